"""Checkpointing for JAX training loops: resumes bit for bit, loses at most the steps since the last save."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxckpt_train.callback import CheckpointCallback
    from jaxckpt_train.checkpoint import (
        load,
        load_checkpointables,
        metadata,
        save,
        save_async,
        save_checkpointables,
        save_checkpointables_async,
        verify,
    )
    from jaxckpt_train.checkpointables.contract import Saved, Staged
    from jaxckpt_train.checkpointables.pytree import JsonValue
    from jaxckpt_train.checkpointables.registry import register_handler
    from jaxckpt_train.errors import (
        CheckpointError,
        CheckpointExistsError,
        CheckpointTimeoutError,
        CorruptCheckpointError,
        DirectoryLockedError,
        FormatVersionError,
        IncompleteCheckpointError,
        IteratorStateError,
        MismatchError,
        NotACheckpointError,
        Preempted,
        SettingsError,
        StepNotFoundError,
        StorageError,
        UnsupportedLeafError,
    )
    from jaxckpt_train.metadata import CheckpointMetadata
    from jaxckpt_train.pending import PendingSave
    from jaxckpt_train.settings import StoreSettings
    from jaxckpt_train.steps.manager import SaveResult, StepManager
    from jaxckpt_train.steps.preservation_policies import (
        AnyPreservationPolicy,
        BestN,
        CustomSteps,
        EveryNSeconds,
        EveryNSteps,
        EveryNStepsClosest,
        LatestDuration,
        LatestN,
        PreserveAll,
    )
    from jaxckpt_train.steps.save_policies import (
        AllSavePolicy,
        AnySavePolicy,
        ContinuousCheckpointingPolicy,
        EverySecondsPolicy,
        FixedIntervalPolicy,
        ImprovementPolicy,
        InitialSavePolicy,
        PreemptionCheckpointingPolicy,
        SpecificStepsPolicy,
    )
    from jaxckpt_train.store.verify import VerifyReport
    from jaxckpt_train.tree.flatten import PLACEHOLDER

_HOMES = {
    "callback": ("CheckpointCallback",),
    "checkpoint": (
        "load", "load_checkpointables", "metadata", "save", "save_async", "save_checkpointables",
        "save_checkpointables_async", "verify",
    ),
    "checkpointables.contract": ("Saved", "Staged"),
    "checkpointables.pytree": ("JsonValue",),
    "checkpointables.registry": ("register_handler",),
    "errors": (
        "CheckpointError", "CheckpointExistsError", "CheckpointTimeoutError", "CorruptCheckpointError",
        "DirectoryLockedError", "FormatVersionError", "IncompleteCheckpointError", "IteratorStateError",
        "MismatchError", "NotACheckpointError", "Preempted", "SettingsError", "StepNotFoundError", "StorageError",
        "UnsupportedLeafError",
    ),
    "metadata": ("CheckpointMetadata",),
    "pending": ("PendingSave",),
    "settings": ("StoreSettings",),
    "steps.manager": ("SaveResult", "StepManager"),
    "steps.preservation_policies": (
        "AnyPreservationPolicy", "BestN", "CustomSteps", "EveryNSeconds", "EveryNSteps", "EveryNStepsClosest",
        "LatestDuration", "LatestN", "PreserveAll",
    ),
    "steps.save_policies": (
        "AllSavePolicy", "AnySavePolicy", "ContinuousCheckpointingPolicy", "EverySecondsPolicy",
        "FixedIntervalPolicy", "ImprovementPolicy", "InitialSavePolicy", "PreemptionCheckpointingPolicy",
        "SpecificStepsPolicy",
    ),
    "store.verify": ("VerifyReport",),
    "tree.flatten": ("PLACEHOLDER",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604, RUF100  # the same names as above, which a test compares
    *sorted(_HOME_OF),
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import jaxckpt_train` alone stays fast."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
