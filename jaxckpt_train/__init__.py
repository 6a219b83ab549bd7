"""Checkpointing for JAX training loops: resumes bit for bit, and loses at most the updates since the last save."""

from __future__ import annotations

import atexit
import importlib
import inspect
import sys
from typing import Any

_HOMES = {
    "callback": ("CheckpointCallback",),
    "checkpoint": (
        "load", "load_checkpointables", "metadata", "save", "save_async", "save_checkpointables",
        "save_checkpointables_async", "verify",
    ),
    "checkpointables.base": ("JsonValue", "Saved", "Staged"),
    "checkpointables.iterator_state": ("CountedIterator", "PerProcess"),
    "checkpointables.handlers": ("register_handler",),
    "errors": (
        "CheckpointError", "CheckpointExistsError", "CheckpointTimeoutError", "CorruptCheckpointError",
        "DirectoryLockedError", "FormatVersionError", "IncompleteCheckpointError", "IteratorStateError",
        "MismatchError", "NonFiniteError", "NotACheckpointError", "OtherProcessError", "Preempted", "SettingsError",
        "StepNotFoundError", "StorageError", "UnsupportedLeafError",
    ),
    "manager": ("StepManager",),
    "checkpoint_metadata": ("CheckpointMetadata",),
    "metrics.exporters": ("OpenTelemetrySink", "PrometheusSink", "WriterSink"),
    "pending": ("PendingSave",),
    "policies.preservation": (
        "AnyPreservationPolicy", "BestN", "CustomSteps", "EveryNSeconds", "EveryNSteps", "EveryNStepsClosest",
        "LatestDuration", "LatestN", "PreserveAll",
    ),
    "policies.save": (
        "AllSavePolicy", "AnySavePolicy", "ContinuousCheckpointingPolicy", "EverySecondsPolicy",
        "FixedIntervalPolicy", "ImprovementPolicy", "InitialSavePolicy", "OverheadBudgetPolicy",
        "PreemptionCheckpointingPolicy", "SpecificStepsPolicy", "TemporarySavePolicy", "YoungDalyPolicy",
    ),
    "preemption.clouds": ("AwsNotice", "GceNotice"),
    "preemption.sources": ("KubernetesNotice", "Notice", "NoticeSource", "SlurmNotice"),
    "pytree.flatten": ("PLACEHOLDER",),
    "run.retention": ("BestLink",),
    "run.saving": ("SaveResult",),
    "settings": ("FastTierSettings", "ObjectStoreSettings", "StoreSettings"),
    "store.verify": ("VerifyReport",),
}  # fmt: skip
_MODULES = ("errors", "testing")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import jaxckpt_train` alone stays fast."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    if _HOME_OF[name] != "errors":  # that module is public itself
        _move_here(value)
    globals()[name] = value
    return value


def _move_here(value: Any) -> None:
    """Make a class or function report this package as its module, instead of the one that defines it."""
    if isinstance(value, type):  # evaluate its annotations, which are text, while its module is still the original
        value.__annotations__ = inspect.get_annotations(value, eval_str=True)
    if callable(value):
        value.__module__ = __name__


def _finish_saves() -> None:
    """Finish pending saves at the end of the process. Registered here, to run after most exit functions of users."""
    pending = sys.modules.get(f"{__name__}.pending")
    if pending is not None:
        pending.finish_at_exit()


# Register it twice: an interrupt that an exit function in C has delayed ends the next exit function at its first line.
atexit.register(_finish_saves)
atexit.register(_finish_saves)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
