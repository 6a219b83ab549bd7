"""The options of Orbax's manager: own ones, and Orbax's as they are; what cannot be honoured is told by name.

The names of Orbax's `args`, for programs that have no Orbax: what is saved or restored, and as what.

Each says by its type what the checkpointable is, and has the attributes of Orbax's class of the same name. Those that
`orbax_manager` refuses, or that have no effect, are told when they are used.

The policies that Orbax's manager options stand for, among them those that call functions of the user.

What Orbax's `logger` is given of each save and restore: when its parts began, and how many seconds they took.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxckpt_train._validation import one_of, optional, refuse, whole
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.pending import PendingSave
from jaxckpt_train.policies.context import (
    CheckpointInfo,
    DecisionContext,
    PreservationPolicy,
    SavePolicy,
    ask_to_preserve,
)
from jaxckpt_train.policies.preservation import AnyPreservationPolicy, CustomSteps, EveryNSeconds, EveryNSteps, LatestN
from jaxckpt_train.policies.save import (
    AnySavePolicy,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SpecificStepsPolicy,
)
from jaxckpt_train.run.entry import parse_step_name

_log = logging.getLogger("jaxckpt_train")
_REFUSED = {
    "todelete_full_path": "it is for Google Cloud Storage; todelete_subdir moves steps within the run",
}
_WITHOUT_EFFECT = {
    "step_prefix": "the directory of step 100 is called step-0000000100",
    "step_format_fixed_length": "the directory of step 100 is called step-0000000100",
    "step_name_format": "the directory of step 100 is called step-0000000100",
    "create": "the directory is made by the first save",
    "num_deletion_threads": "one thread deletes, beside the loop",
    "atomicity_options": "a step is renamed into place once it is on the disk",
    "temporary_path_class": "a step is renamed into place once it is on the disk",
    "enable_should_save_is_saving_in_progress_check": "a policy is told whether a save is under way",
    "enable_per_process_directory_creation": "process 0 makes directories",
}
_OF_OTHERS: dict[str, Mapping[str, Any]] = {
    "multiprocessing_options": {"primary_host": 0, "active_processes": None, "barrier_sync_key_prefix": None},
    "file_options": {"path_permission_mode": None, "skip_sync_file_validations": False},
    "async_options": {"timeout_secs": 1200, "barrier_sync_fn": None, "create_directories_asynchronously": True},
}


class StandardLogger:
    """Logs each entry to jaxckpt_train."""

    def log_entry(self, entry: Any) -> None:
        """One line, at the level INFO."""
        _log.info("%s", entry)


def checked_logger(logger: Any) -> Any:
    """The logger that is given, or the standard one.

    Raises:
        SettingsError: it has no `log_entry`.
    """
    if logger is None:
        return StandardLogger()
    if not callable(getattr(logger, "log_entry", None)):
        raise SettingsError(f"CheckpointManager: logger: expected an object with log_entry(entry), found {logger!r}")
    return logger


class CallStatistics:
    """The entry of one call, with Orbax's names.

    Args:
        event_type: "save" or "restore".
        step: which one.
        directory: of the run.
    """

    def __init__(self, event_type: str, step: int | None, directory: str) -> None:
        self._started = time.time()
        self.entry: dict[str, Any] = {"step": step, "event_type": event_type, "directory": directory}

    def part(self, name: str, started: float, ended: float | None = None) -> None:
        """Note a part of the call; `ended`: None: now."""
        seconds = max(0.0, (time.time() if ended is None else ended) - started)
        self.entry |= {f"{name}_start_time": started, f"{name}_duration_secs": seconds}

    def ended(self, name: str, logger: Any) -> None:
        """Note the whole call, and log the entry."""
        self.part(name, self._started)
        logger.log_entry(self.entry)


class EndOfSave:
    """Notices when a save ends that the next one may wait for.

    Args:
        pending: the save; None: there is none.
    """

    def __init__(self, pending: PendingSave[Any] | None) -> None:
        self.time: float | None = time.time()
        if pending is not None and not pending.done():
            self.time = None
            pending.committed.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self.time = time.time()


def _named(function: object) -> str:
    """A function as text that is the same in all processes of a job."""
    return getattr(function, "__qualname__", type(function).__name__)


@dataclasses.dataclass(frozen=True, repr=False)
class ShouldSaveFunction:
    """Saves when a function of the step and of the newest step there is (None: none) says so.

    Source: Orbax, `CheckpointManagerOptions.should_save_fn`.
    """

    function: Callable[[int, int | None], bool]

    def __repr__(self) -> str:
        return f"should_save_fn={_named(self.function)}"

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        """What the function says."""
        return bool(self.function(step.step, previous_steps[-1].step if previous_steps else None))


@dataclasses.dataclass(frozen=True, repr=False)
class BestByFunction:
    """Keeps the `n` steps whose metrics a function gives the best value; of equal ones the later. nan is the worst.

    Source: Orbax, `CheckpointManagerOptions.best_fn`.

    Attributes:
        function: of the metrics of a step.
        mode: "min": lower is better; "max": higher is better.
        n: how many; None: all.
        keeps_others: whether steps without metrics are kept.
    """

    function: Callable[[Mapping[str, Any]], float]
    mode: str
    n: int | None = None
    keeps_others: bool = True

    def __repr__(self) -> str:
        return f"best_fn={_named(self.function)} ({self.mode}, {self.n})"

    def ranked(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those that have metrics, the best last."""
        sign = -1 if self.mode == "min" else 1

        def quality(info: CheckpointInfo) -> float:
            value = sign * float(self.function(dict(info.metrics or {})))
            return -math.inf if math.isnan(value) else value

        return sorted((info for info in checkpoints if info.metrics is not None), key=quality)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for the best."""
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        ranked = self.ranked(checkpoints)
        kept = {info.step for info in ranked[max(0, len(ranked) - self.n) :]}
        return [info.step in kept or (info.metrics is None and self.keeps_others) for info in checkpoints]


class ButDeleted:
    """Keeps what another policy keeps, but for steps that the user has deleted.

    Args:
        policy: the other one; None: it keeps all.

    Attributes:
        deleted: the steps.
    """

    def __init__(self, policy: PreservationPolicy | None) -> None:
        self._policy = policy
        self.deleted: set[int] = set()

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """True for what is kept."""
        left = [info for info in checkpoints if info.step not in self.deleted]
        answers = [True] * len(left) if self._policy is None else ask_to_preserve(self._policy, left, context=context)
        kept = {info.step for info, is_kept in zip(left, answers, strict=True) if is_kept}
        return [info.step in kept for info in checkpoints]


@dataclasses.dataclass
class StandardSave:
    """Save a pytree.

    Attributes:
        item: the pytree; numbers, text, keys and NumPy arrays among its leaves come back as such.
        save_args: a tree of `SaveArgs`; None: each leaf as it is.
        custom_metadata: None: it belongs to the step, as `save(..., custom_metadata=...)`.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclasses.dataclass
class StandardRestore:
    """Restore a pytree.

    Attributes:
        item: the target, of arrays, `jax.ShapeDtypeStruct`s, or values; None: as it was saved, in dicts, lists and
            tuples.
        strict: True: shapes must fit.
        support_layout: False.
        fallback_sharding: of leaves that bring none; None: the default device.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None


@dataclasses.dataclass
class PyTreeSave:
    """As `StandardSave`.

    Attributes:
        ocdbt_target_data_file_size: has no effect; `StoreSettings.segment_bytes` is ours.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclasses.dataclass
class PyTreeRestore:
    """Restore a pytree, each leaf as its own arguments say.

    Attributes:
        item: a tree of the structure that is restored, whose leaves may be anything; None: as it was saved.
        restore_args: a tree of `RestoreArgs`, with the structure of `item` or of a part of it.
        transforms: None; or {}, which is as `partial_restore`.
        legacy_transform_fn: None.
        partial_restore: whether what is not in `item` is passed over.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclasses.dataclass
class SaveArgs:
    """How one leaf is saved.

    Attributes:
        dtype: the dtype that it is converted to; None: its own.
    """

    dtype: Any = None


@dataclasses.dataclass
class RestoreArgs:
    """How one leaf is restored.

    Attributes:
        restore_type: `np.ndarray`: on the host; `jax.Array`, int, float, str; None: as it was saved.
        dtype: the dtype that it is converted to; None: that of the checkpoint.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How one leaf is restored as a `jax.Array`.

    Attributes:
        mesh, mesh_axes: its sharding, as a mesh and a `jax.sharding.PartitionSpec`; None: see `sharding`.
        sharding: its sharding; None: the one that it was saved with, else the default device.
        global_shape: its shape, which has to be that of the checkpoint; None: not compared.
    """

    restore_type: Any = jax.Array
    mesh: jax.sharding.Mesh | None = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None


@dataclasses.dataclass
class JsonSave:
    """Save plain JSON data: None, bool, int, float, text, and lists and dicts of these with text keys."""

    item: Any


@dataclasses.dataclass
class JsonRestore:
    """Restore JSON data as it was saved; `item` is not looked at."""

    item: Any = None


@dataclasses.dataclass
class ArraySave:
    """Save one array or number."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore:
    """Restore one array or number; `restore_args` as one leaf of `PyTreeRestore.restore_args`."""

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class JaxRandomKeySave:
    """Save one PRNG key of JAX."""

    item: jax.Array
    save_args: Any = None


@dataclasses.dataclass
class JaxRandomKeyRestore:
    """Restore one PRNG key of JAX."""

    restore_args: Any = None


@dataclasses.dataclass
class NumpyRandomKeySave:
    """Save the state of a NumPy generator: of `np.random.get_state()`, or of a bit generator's `state`."""

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore:
    """Restore the state of a NumPy generator."""


@dataclasses.dataclass
class CheckpointSave:
    """Save the position of a data iterator, as Grain's class of this name: of Grain, or with `get_state`."""

    item: Any


@dataclasses.dataclass
class CheckpointRestore:
    """Set a data iterator to the saved position, as Grain's class of this name."""

    item: Any


class Composite(Mapping[str, Any]):
    """Several checkpointables by name, to save or restore, or as they were restored: `found.state`, `found["state"]`.

    Raises:
        SettingsError: a name begins with two underscores.
    """

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise SettingsError(f"Composite: expected names that do not begin with '__', found {name!r}")
        super().__setattr__("_items", items)

    def __getitem__(self, name: str) -> Any:
        items: dict[str, Any] = self._items
        if name not in items:
            raise KeyError(f"{name!r}: expected one of {', '.join(map(repr, items)) or 'none'}")
        return items[name]

    def __getattr__(self, name: str) -> Any:
        items: dict[str, Any] = super().__getattribute__("_items")
        if name in items:
            return items[name]
        raise AttributeError(f"{name!r}: expected one of {', '.join(map(repr, items)) or 'none'}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Composite does not change; make a new one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"


@dataclasses.dataclass(frozen=True)
class CheckpointManagerOptions:
    """What `CheckpointManager` does by itself; names, defaults and meanings are Orbax's.

    Attributes:
        save_interval_steps: save each step that is a multiple of this.
        max_to_keep: how many of the newest steps, or with `best_fn` of the best, are kept; None: all. A newest step
            that is not kept is not listed, and stays on the disk until the next one is there.
        keep_time_interval: keep at least one step in each such time; None: no rule of this kind.
        keep_period: keep steps that are a multiple of this; None: no rule of this kind.
        best_fn: gives the value of a step's metrics, which are numbers by name; None: no step is better.
        best_mode: "max": higher is better; "min": lower is.
        keep_checkpoints_without_metrics: whether these are kept beside the best.
        save_on_steps: further steps to save.
        should_save_fn: of the step and the newest one there is: says instead of the above whether to save.
        save_decision_policy: says instead of all of the above whether to save.
        preservation_policy: says instead of all of the above which steps are kept.
        todelete_subdir: a subdirectory of the run, into which steps are moved that would be deleted; None: none.
        read_only: nothing is saved and nothing is deleted; each call that would tells so.
        enable_async_checkpointing: False: `save` returns once the step is on the disk.
        prevent_write_metrics: True: metrics are not saved.
        async_options: an object whose `post_finalization_callback` is called once a step is on the disk.

    `cleanup_tmp_directories`, `single_host_load_and_broadcast`, `enable_background_delete`, `save_root_metadata` and
    `lightweight_initialize` change nothing: it is done so, or done without. All others are refused or warned about.

    Raises:
        SettingsError: a value is wrong, two exclude each other, or one cannot be honoured.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Collection[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: Any = None
    multiprocessing_options: Any = None
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: Any = None
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: SavePolicy | None = None
    preservation_policy: PreservationPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        checks = {
            "save_interval_steps": whole(0 if self.read_only else 1),  # which Orbax sets so
            "max_to_keep": optional(whole(0)),
            "keep_period": optional(whole(1)),
            "best_mode": one_of("min", "max"),
            "best_fn": optional(_function),
            "should_save_fn": optional(_function),
        }
        for name, check in checks.items():
            check(f"CheckpointManagerOptions.{name}", getattr(self, name))
        for name, instead in _REFUSED.items():
            if getattr(self, name) is not None:
                raise SettingsError(f"CheckpointManagerOptions.{name}: expected None: {instead}")
        folder = self.todelete_subdir
        if folder is not None and (folder in ("", ".", "..") or "/" in folder or parse_step_name(folder) is not None):
            raise SettingsError(f"CheckpointManagerOptions.todelete_subdir: expected a plain name, found {folder!r}")
        limits = ("max_to_keep", "keep_time_interval", "keep_period")
        if self.preservation_policy is not None and any(getattr(self, name) for name in limits):
            raise SettingsError(f"CheckpointManagerOptions: expected preservation_policy alone, or {', '.join(limits)}")
        if self.prevent_write_metrics and self.best_fn is not None:
            raise SettingsError("CheckpointManagerOptions.prevent_write_metrics: expected False with best_fn")

    @property
    def finalized(self) -> Callable[[], Any] | None:
        """What is called once a step is on the disk."""
        found: Callable[[], Any] | None = getattr(self.async_options, "post_finalization_callback", None)
        return found


def _function(subject: str, value: Any) -> Any:
    return value if callable(value) else refuse(subject, "a function, or None", value)


def read_options(options: Any) -> CheckpointManagerOptions:
    """Options as own ones; None: the defaults. Those that have no effect are warned about, by name.

    Args:
        options: own ones, or any object with such attributes, as Orbax's.

    Raises:
        SettingsError: one cannot be honoured, or is not known here.
    """
    if options is not None:
        _refuse_processes(options)
    if options is None:
        return CheckpointManagerOptions()
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(CheckpointManagerOptions)}
    for field in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        if field.name not in fields and getattr(options, field.name) != field.default:
            raise SettingsError(
                f"options: {field.name}: expected {field.default!r}, found {getattr(options, field.name)!r}: it is not "
                "known here what that stands for"
            )
    found = CheckpointManagerOptions(**{name: getattr(options, name, value) for name, value in fields.items()})
    told = without_effect(found)
    if told:
        _log.warning("CheckpointManagerOptions without effect here: %s", "; ".join(told))
    return found


def _refuse_processes(options: Any) -> None:
    """Refuse to save with some processes of a job only. A single process is the whole job, whatever it is called."""
    found = _others(options, "multiprocessing_options")
    is_single_process = current().processes == 1 and found.get("active_processes") in (None, {0})
    if found.keys() - {"barrier_sync_key_prefix"} and not is_single_process:
        raise SettingsError(
            f"CheckpointManagerOptions.multiprocessing_options: expected all processes of the job, led by process 0, "
            f"found {found}"
        )


def without_effect(options: CheckpointManagerOptions) -> list[str]:
    """The options that have none, each with what is done instead."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    is_made = options.read_only  # by Orbax, which sets `create` then
    found = [
        f"{name} ({instead})"
        for name, instead in _WITHOUT_EFFECT.items()
        if getattr(options, name) != defaults[name] and not (name == "create" and is_made)
    ]
    for name in ("file_options", "async_options"):
        found += [f"{name}.{each}" for each in _others(options, name)]
    return found


def _others(options: Any, name: str) -> dict[str, Any]:
    """Of an option that is an object of others, the attributes that are set, with their values."""
    given, known = getattr(options, name, None), _OF_OTHERS[name]
    found = {each: getattr(given, each, default) for each, default in known.items()}
    return {each: value for each, value in found.items() if given is not None and value != known[each]}


def save_policy(options: CheckpointManagerOptions) -> SavePolicy:
    """Which steps are saved."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    at_preemption = PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        return AnySavePolicy([ShouldSaveFunction(options.should_save_fn), at_preemption])
    reasons: list[SavePolicy] = [FixedIntervalPolicy(max(1, options.save_interval_steps))]
    if options.save_on_steps:
        reasons.append(SpecificStepsPolicy(frozenset(options.save_on_steps)))
    return AnySavePolicy([*reasons, at_preemption, InitialSavePolicy()])


def best_policy(options: CheckpointManagerOptions) -> BestByFunction | None:
    """Which steps are better; None: nobody says."""
    if options.best_fn is None:
        return None
    keeps_others = options.keep_checkpoints_without_metrics
    return BestByFunction(options.best_fn, options.best_mode, options.max_to_keep, keeps_others)


def may_drop_newest(options: CheckpointManagerOptions) -> bool:
    """Whether a step that was just saved may be one that the options do not keep."""
    if options.preservation_policy is not None:
        return True
    return options.max_to_keep is not None and (options.best_fn is not None or options.max_to_keep == 0)


def preservation_policy(options: CheckpointManagerOptions) -> PreservationPolicy | None:
    """Which steps are kept; None: all."""
    if options.preservation_policy is not None:
        return options.preservation_policy
    if options.max_to_keep is None:
        return None
    best = best_policy(options)
    newest: PreservationPolicy = LatestN(options.max_to_keep) if options.max_to_keep else CustomSteps(frozenset())
    reasons: list[PreservationPolicy] = [newest if best is None else best]
    if options.keep_period is not None:
        reasons.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        reasons.append(EveryNSeconds(options.keep_time_interval.total_seconds()))
    return AnyPreservationPolicy(reasons)
