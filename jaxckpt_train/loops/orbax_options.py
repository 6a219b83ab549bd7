"""The options of Orbax's manager: own ones, and Orbax's as they are; what cannot be honoured is told by name."""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.loops.orbax_policies import BestByFunction, ShouldSaveFunction
from jaxckpt_train.multihost import current
from jaxckpt_train.steps.policy_context import PreservationPolicy, SavePolicy
from jaxckpt_train.steps.preservation_policies import (
    AnyPreservationPolicy,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
)
from jaxckpt_train.steps.save_policies import (
    AnySavePolicy,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SpecificStepsPolicy,
)
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.value_checks import one_of, optional, refuse, whole

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
    is_alone = current().processes == 1 and found.get("active_processes") in (None, {0})
    if found.keys() - {"barrier_sync_key_prefix"} and not is_alone:
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
