"""The args, options and policies of the Orbax-style manager, for programs that do not import Orbax.

Each args class has the name and the attributes of Orbax's class. An option that this package cannot honour raises an
error, and one that has no effect is logged; both name the option.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxckpt_train._validation import one_of, optional, refuse, whole
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import SettingsError
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
_WITHOUT_EFFECT = (
    "step_prefix step_format_fixed_length step_name_format create num_deletion_threads atomicity_options "
    "temporary_path_class enable_should_save_is_saving_in_progress_check enable_per_process_directory_creation"
).split()
# The attributes of nested option objects, with their defaults.
_NESTED_DEFAULTS: dict[str, Mapping[str, Any]] = {
    "multiprocessing_options": {"primary_host": 0, "active_processes": None, "barrier_sync_key_prefix": None},
    "file_options": {"path_permission_mode": None, "skip_sync_file_validations": False},
    "async_options": {"timeout_secs": 1200, "barrier_sync_fn": None, "create_directories_asynchronously": True},
}


def _named(function: object) -> str:
    """Return a name of a function that is the same in all processes of a job."""
    return getattr(function, "__qualname__", type(function).__name__)


@dataclasses.dataclass(frozen=True, repr=False)
class _ShouldSaveFunction:
    """Saves if a function of the step and of the newest existing step (or None) returns True, as in Orbax."""

    function: Callable[[int, int | None], bool]

    def __repr__(self) -> str:
        return f"should_save_fn={_named(self.function)}"

    def should_save(
        self, step: CheckpointInfo, previous_steps: Sequence[CheckpointInfo], *, context: DecisionContext
    ) -> bool:
        return bool(self.function(step.step, previous_steps[-1].step if previous_steps else None))


@dataclasses.dataclass(frozen=True, repr=False)
class BestByFunction:
    """Keeps the `n` steps (None: all) with the best value of Orbax's `best_fn`, of which NaN is the worst.

    On a tie the later step is better. `keeps_others` also keeps steps without metrics.
    """

    function: Callable[[Mapping[str, Any]], float]
    mode: str
    n: int | None
    keeps_others: bool

    def __repr__(self) -> str:
        return f"best_fn={_named(self.function)} ({self.mode}, {self.n})"

    def ranked(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return the steps that have metrics, the best last."""
        sign = -1 if self.mode == "min" else 1

        def quality(info: CheckpointInfo) -> float:
            value = sign * float(self.function(dict(info.metrics or {})))
            return -math.inf if math.isnan(value) else value

        return sorted((info for info in checkpoints if info.metrics is not None), key=quality)

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """Return True for the best steps."""
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        ranked = self.ranked(checkpoints)
        kept = {info.step for info in ranked[max(0, len(ranked) - self.n) :]}
        return [info.step in kept or (info.metrics is None and self.keeps_others) for info in checkpoints]


class ButDeleted:
    """Keeps the steps that another policy keeps (None: all), except the `deleted` ones."""

    def __init__(self, policy: PreservationPolicy | None) -> None:
        self._policy = policy
        self.deleted: set[int] = set()

    def should_preserve(self, checkpoints: Sequence[CheckpointInfo], *, context: DecisionContext) -> list[bool]:
        """Return True for the steps to keep."""
        left = [info for info in checkpoints if info.step not in self.deleted]
        answers = [True] * len(left) if self._policy is None else ask_to_preserve(self._policy, left, context=context)
        kept = {info.step for info, is_kept in zip(left, answers, strict=True) if is_kept}
        return [info.step in kept for info in checkpoints]


@dataclasses.dataclass
class StandardSave:
    """Save a pytree.

    Attributes:
        item: the pytree; leaves that are numbers, text, PRNG keys or NumPy arrays are restored as such.
        save_args: a tree of `SaveArgs`; None: save each leaf as it is.
        custom_metadata: must be None; pass it to `save(..., custom_metadata=...)`.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclasses.dataclass
class StandardRestore:
    """Restore a pytree.

    Attributes:
        item: the target, a tree of arrays, `jax.ShapeDtypeStruct`s and plain values; None: as it was saved.
        strict: must be True: shapes must be equal.
        support_layout: must be False.
        fallback_sharding: the sharding of leaves that have none; None: the default device.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None


@dataclasses.dataclass
class PyTreeSave:
    """Save a pytree, as `StandardSave` does. `ocdbt_target_data_file_size` has no effect."""

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclasses.dataclass
class PyTreeRestore:
    """Restore a pytree with separate arguments for each leaf.

    Attributes:
        item: a tree with the structure to restore; its leaves are ignored. None: as it was saved.
        restore_args: a tree of `RestoreArgs`, with the structure of `item` or of a part of it.
        transforms: must be None, or {}, which means `partial_restore`.
        legacy_transform_fn: must be None.
        partial_restore: whether to skip leaves of the checkpoint that are not in `item`.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclasses.dataclass
class SaveArgs:
    """Arguments for saving one leaf: the dtype to convert it to, or None for its own dtype."""

    dtype: Any = None


@dataclasses.dataclass
class RestoreArgs:
    """Arguments for restoring one leaf.

    Attributes:
        restore_type: `np.ndarray` for an array on the host, or `jax.Array`, int, float, str; None: as it was saved.
        dtype: the dtype to convert the leaf to; None: the dtype in the checkpoint.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """Arguments for restoring one leaf as a `jax.Array`.

    Attributes:
        mesh, mesh_axes: the sharding as a mesh and a `jax.sharding.PartitionSpec`; None: see `sharding`.
        sharding: the sharding; None: the sharding that it was saved with, else the default device.
        global_shape: the shape, which must equal the shape in the checkpoint; None: not compared.
    """

    restore_type: Any = jax.Array
    mesh: jax.sharding.Mesh | None = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None


@dataclasses.dataclass
class JsonSave:
    """Save plain JSON data: None, bool, int, float, str, and lists and dicts of these with str keys."""

    item: Any


@dataclasses.dataclass
class JsonRestore:
    """Restore JSON data as it was saved; `item` is ignored."""

    item: Any = None


@dataclasses.dataclass
class ArraySave:
    """Save one array or number."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore:
    """Restore one array or number; `restore_args` is like one leaf of `PyTreeRestore.restore_args`."""

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class JaxRandomKeySave:
    """Save one JAX PRNG key."""

    item: jax.Array
    save_args: Any = None


@dataclasses.dataclass
class JaxRandomKeyRestore:
    """Restore one JAX PRNG key."""

    restore_args: Any = None


@dataclasses.dataclass
class NumpyRandomKeySave:
    """Save the state of a NumPy generator: `np.random.get_state()`, or the `state` of a bit generator."""

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore:
    """Restore the state of a NumPy generator."""


@dataclasses.dataclass
class CheckpointSave:
    """Save the position of a Grain iterator, or of any iterator with `get_state`."""

    item: Any


@dataclasses.dataclass
class CheckpointRestore:
    """Set a data iterator to the saved position."""

    item: Any


class Composite(Mapping[str, Any]):
    """The args or the restored values of several checkpointables, by name: `found.state`, `found["state"]`.

    Raises:
        SettingsError: a name begins with two underscores.
    """

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise SettingsError(f"Composite: expected names that do not begin with '__', found {name!r}")
        super().__setattr__("_items", items)

    def __getitem__(self, name: str) -> Any:
        items: dict[str, Any] = super().__getattribute__("_items")
        if name not in items:
            raise KeyError(f"{name!r}: expected one of {', '.join(map(repr, items)) or 'none'}")
        return items[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(*error.args) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Composite is immutable: create a new one to set {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"


@dataclasses.dataclass(frozen=True)
class CheckpointManagerOptions:
    """The options of `CheckpointManager`, with Orbax's names, defaults and meanings.

    Attributes:
        save_interval_steps: save the steps that are a multiple of this.
        max_to_keep: the number of steps to keep, the newest ones, or the best ones with `best_fn`; None: all. If the
            newest step is not kept, it is not listed and stays on disk until the next step is committed.
        keep_time_interval: keep at least one step in each interval of this length.
        keep_period: keep the steps that are a multiple of this.
        best_fn: computes the value of a step from its metrics, which are numbers by name; None: steps are not ranked.
        best_mode: "max": higher is better; "min": lower is better.
        keep_checkpoints_without_metrics: whether to keep steps without metrics in addition to the best.
        save_on_steps: further steps to save.
        should_save_fn: decides whether to save from the step and the newest existing step; replaces the options above.
        save_decision_policy: decides whether to save; replaces all of the options above.
        preservation_policy: decides which steps to keep; replaces all of the options above.
        todelete_subdir: a subdirectory of the run that steps are moved into instead of being deleted; None: delete.
        read_only: save and delete nothing, and log a warning for each call that would.
        enable_async_checkpointing: False: `save` returns once the step is committed.
        prevent_write_metrics: True: do not save metrics.
        async_options: an object whose `post_finalization_callback` is called after each commit.

    `cleanup_tmp_directories`, `single_host_load_and_broadcast`, `enable_background_delete`, `save_root_metadata` and
    `lightweight_initialize` need no action. All other options raise an error or log a warning.

    Raises:
        SettingsError: a value is wrong, two options exclude each other, or an option is not supported.
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
            "save_interval_steps": whole(0 if self.read_only else 1),  # Orbax sets 0 in a read-only manager
            "max_to_keep": optional(whole(0)),
            "keep_period": optional(whole(1)),
            "best_mode": one_of("min", "max"),
            "best_fn": optional(_function),
            "should_save_fn": optional(_function),
            "todelete_subdir": optional(_subdirectory),
            "todelete_full_path": optional(_no_full_path),
        }
        for name, check in checks.items():
            check(f"CheckpointManagerOptions.{name}", getattr(self, name))
        limits = ("max_to_keep", "keep_time_interval", "keep_period")
        if self.preservation_policy is not None and any(getattr(self, name) for name in limits):
            expected = f"None with {', '.join(limits)}"
            refuse("CheckpointManagerOptions.preservation_policy", expected, self.preservation_policy)
        if self.prevent_write_metrics and self.best_fn is not None:
            refuse("CheckpointManagerOptions.prevent_write_metrics", "False with best_fn", True)


def _function(subject: str, value: Any) -> Any:
    return value if callable(value) else refuse(subject, "a function, or None", value)


def _subdirectory(subject: str, value: str) -> str:
    is_wrong = value in ("", ".", "..") or "/" in value or parse_step_name(value) is not None
    return refuse(subject, "a plain name", value) if is_wrong else value


def _no_full_path(subject: str, value: object) -> NoReturn:
    refuse(subject, "None (use todelete_subdir, which moves deleted steps within the run)", value)


def read_options(options: Any) -> CheckpointManagerOptions:
    """Convert options, also Orbax's, to `CheckpointManagerOptions`. Log a warning that names those without effect.

    Raises SettingsError for an option that is not supported or unknown.
    """
    if options is None:
        return CheckpointManagerOptions()
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(CheckpointManagerOptions)}
    for field in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        if field.name not in defaults and getattr(options, field.name) != field.default:
            refuse(f"options: unknown {field.name}", repr(field.default), getattr(options, field.name))
    found = CheckpointManagerOptions(**{name: getattr(options, name, value) for name, value in defaults.items()})
    _refuse_processes(found)
    unused = [name for name in _WITHOUT_EFFECT if getattr(found, name) != defaults[name]]
    unused += [f"{name}.{each}" for name in ("file_options", "async_options") for each in _changed_nested(found, name)]
    if found.read_only:  # Orbax itself changes `create` then
        unused = [name for name in unused if name != "create"]
    if unused:
        _log.warning("these CheckpointManagerOptions have no effect: %s", ", ".join(unused))
    return found


def _refuse_processes(options: CheckpointManagerOptions) -> None:
    """Refuse options under which only some processes of a multi-process job save."""
    found = _changed_nested(options, "multiprocessing_options")
    is_single_process = current().processes == 1 and found.get("active_processes") in (None, {0})
    if found.keys() - {"barrier_sync_key_prefix"} and not is_single_process:
        expected = "all processes of the job with process 0 as the primary"
        refuse("CheckpointManagerOptions.multiprocessing_options", expected, found)


def _changed_nested(options: CheckpointManagerOptions, name: str) -> dict[str, Any]:
    """Return the attributes of a nested option object that differ from their defaults."""
    given, defaults = getattr(options, name), _NESTED_DEFAULTS[name]
    found = {each: getattr(given, each, default) for each, default in defaults.items()}
    return {each: value for each, value in found.items() if value != defaults[each]}


def save_policy(options: CheckpointManagerOptions) -> SavePolicy:
    """Return the save policy that the options describe."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    at_preemption = PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        return AnySavePolicy([_ShouldSaveFunction(options.should_save_fn), at_preemption])
    reasons: list[SavePolicy] = [FixedIntervalPolicy(max(1, options.save_interval_steps))]
    if options.save_on_steps:
        reasons.append(SpecificStepsPolicy(frozenset(options.save_on_steps)))
    return AnySavePolicy([*reasons, at_preemption, InitialSavePolicy()])


def best_policy(options: CheckpointManagerOptions) -> BestByFunction | None:
    """Return the policy that ranks steps, or None if the options do not rank them."""
    if options.best_fn is None:
        return None
    keeps_others = options.keep_checkpoints_without_metrics
    return BestByFunction(options.best_fn, options.best_mode, options.max_to_keep, keeps_others)


def preservation_policy(options: CheckpointManagerOptions) -> PreservationPolicy | None:
    """Return the preservation policy that the options describe; None: keep all steps."""
    if options.preservation_policy is not None or options.max_to_keep is None:
        return options.preservation_policy
    newest: PreservationPolicy = LatestN(options.max_to_keep) if options.max_to_keep else CustomSteps(frozenset())
    reasons: list[PreservationPolicy] = [best_policy(options) or newest]
    if options.keep_period is not None:
        reasons.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        reasons.append(EveryNSeconds(options.keep_time_interval.total_seconds()))
    return AnyPreservationPolicy(reasons)
