"""The callback's configuration as YAML has it: typed and checked.

Neither Hydra nor OmegaConf is imported: what they made is recognised when they are already there.

Builds the sources of preemption notices that a configuration names, or describes by `_target_`.

Builds the objects that a configuration names by `_target_`: ours by ourselves, any other through Hydra.

Where a fresh run takes its state from: which checkpoint, of whatever origin, which leaves of it, and how changed.

What the running Hydra job says of directories. Hydra is recognised where it runs already, and never imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxckpt_train._validation import (
    Check,
    absolute_path,
    anything,
    flag,
    known_keys,
    nearest,
    one_of,
    optional,
    path_text,
    refuse,
    seconds,
    signals,
    stated_mode,
    text,
    unicode_text,
    whole,
)
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.metrics.events import Owned, Sink
from jaxckpt_train.preemption.sources import NoticeSource
from jaxckpt_train.settings import STALL_TIMEOUT_S, StoreSettings

_ROOT = "checkpoint"
_LONGEST_JOB_NAME = 100
_OPTIONS = ("only", "rename", "cast", "missing", "transforms")
NAMES = {"gce": "GceNotice", "aws": "AwsNotice", "slurm": "SlurmNotice", "kubernetes": "KubernetesNotice"}
_METHODS = ("start", "stop", "notice")
_WANTED = f"one of {', '.join(map(repr, NAMES))}, a node with _target_, or an object that has start, stop and notice"


def resolve_directory(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a run directory.

    Args:
        directory: `~` is the user's home; a relative path starts where the command was given: under Hydra in its
            original working directory, whatever `hydra.job.chdir` says, else in the working directory.

    Raises:
        SettingsError: it is no path, or a URL.
    """
    return Path(absolute_path(f"{_ROOT}.directory", directory, _hydra_value("runtime", "cwd") or ""))


def run_directory(directory: str | os.PathLike[str]) -> Path:
    """As `resolve_directory`; in a Hydra multirun it ends with `job_name()`: no job must continue another one."""
    return resolve_directory(directory) / job_name()


def hydra_directory_problem(directory: str | os.PathLike[str]) -> str | None:
    """What is wrong with keeping checkpoints there in the running Hydra job; None: nothing, or no Hydra job runs.

    Args:
        directory: as given to `resolve_directory`.
    """
    output = _hydra_value("runtime", "output_dir")
    path = resolve_directory(directory)
    kind = "sweep" if is_multirun() else "run"
    if output is None or not path.is_relative_to(output) or not _has_time_in_it(kind):
        return None
    return (
        f"{_ROOT}.directory: {path} lies in the output folder of this Hydra run, which is a new one in every run: the "
        f"same command will not find these checkpoints and will start anew; set {_ROOT}.directory to a path outside of "
        f"{output}, or hydra.{kind}.dir to one without a time in it"
    )


def is_multirun() -> bool:
    """Whether this process runs a job of a Hydra multirun (`--multirun`)."""
    return getattr(_hydra_value("mode"), "name", None) == "MULTIRUN"


def job_name() -> str:
    """In a Hydra multirun, a directory name made from the job's overrides; empty elsewhere."""
    if not is_multirun():
        return ""
    overrides = _hydra_value("overrides", "task") or ()
    whole = ",".join(sorted(one for one in overrides if one.partition("=")[0].lstrip("+~") != f"{_ROOT}.directory"))
    plain = re.sub(r"[^A-Za-z0-9._=,+-]", "_", whole)
    if plain == whole and len(plain) <= _LONGEST_JOB_NAME:
        return plain
    return f"{plain[:_LONGEST_JOB_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _has_time_in_it(kind: str) -> bool:
    """Whether the template of the output folder, hydra.run.dir or hydra.sweep.dir, makes a new one in every run."""
    omegaconf: Any = sys.modules["omegaconf"]
    return "${now" in str(omegaconf.OmegaConf.to_container(_hydra_value(kind), resolve=False))


def _hydra_value(*path: str) -> Any:
    """A value of the running Hydra job's own configuration; None: it is not set, or no Hydra job runs."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    node = module.HydraConfig.get()
    for name in path:
        node = None if node is None else node.get(name)
    return node


def initial_state(subject: str, value: Any) -> Any:
    """A path, or a mapping with `path` and what `jaxckpt_train.load` takes: only, rename, cast, missing, transforms.

    Raises:
        SettingsError: it is neither, or an option is wrong.
    """
    if not isinstance(value, Mapping):
        return path_text(subject, value)
    # Which need JAX: a configuration is looked at without.
    from jaxckpt_train.pytree.restore import LoadOptions
    from jaxckpt_train.transforms.apply import operations_of

    given = known_keys(subject, value, ("path", *_OPTIONS))
    if "path" not in given:
        raise SettingsError(f"{subject}: expected path, of a checkpoint, found {', '.join(given) or 'nothing'}")
    found = {"path": path_text(f"{subject}.path", given.pop("path")), **given}
    found["transforms"] = operations_of(f"{subject}.transforms", given.get("transforms"))
    try:
        LoadOptions(**{name: option for name, option in given.items() if name != "transforms"})
    except SettingsError as error:
        raise SettingsError(f"{subject}: {error}") from error
    return found


def path_and_options(value: Any) -> tuple[Any, dict[str, Any]]:
    """Both as `jaxckpt_train.load` takes them."""
    checked = initial_state("init_from", value)
    if not isinstance(checked, dict):
        return checked, {}
    return checked["path"], {name: option for name, option in checked.items() if name != "path"}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a node is to make.

    Attributes:
        kind: of it, in one word.
        has: what an object of the kind has, for messages.
        fits: whether an object is one.
        is_ours: whether a public name of this package, also within a node, makes such objects.
    """

    kind: str
    has: str
    fits: Callable[[Any], bool]
    is_ours: Callable[[Any], bool]


def build_policy(subject: str, value: Any, method: str) -> Any:
    """None, or an object with the method, built first if `value` is a node with `_target_`."""

    def is_ours(found: Any) -> bool:
        return hasattr(found, "should_save") or hasattr(found, "should_preserve")

    wanted = Wanted("policy", f"has {method}(...)", lambda made: callable(getattr(made, method, None)), is_ours)
    return None if value is None else _built_node(subject, value, wanted)


def build_sinks(subject: str, values: list[Any]) -> tuple[Sink, ...]:
    """The sinks of a list; one that is a node with `_target_` is built first, and closed with the run."""

    def is_ours(found: Any) -> bool:
        module, name = str(getattr(found, "__module__", "")), str(getattr(found, "__name__", ""))
        return module.startswith(f"{__package__}.sinks.") or (module == __package__ and name.endswith("Sink"))

    wanted = Wanted("sink", "is called with every event", callable, is_ours)
    sinks = []
    for position, value in enumerate(values):
        sink = _built_node(f"{subject}[{position}]", value, wanted)
        sinks.append(Owned(sink) if isinstance(value, Mapping) else sink)
    return tuple(sinks)


def _built_node(subject: str, value: Any, wanted: Wanted) -> Any:
    made = instantiated(subject, value, wanted) if isinstance(value, Mapping) else value
    if isinstance(made, type) or not wanted.fits(made):
        refuse(subject, f"a node with _target_, or an object, that {wanted.has}", value)
    return made


def instantiated(subject: str, node: Any, wanted: Wanted) -> Any:
    """A node with everything in it that has a `_target_` built.

    Raises:
        SettingsError: something cannot be built.
    """
    if isinstance(node, (list, tuple)):
        return [instantiated(f"{subject}[{position}]", child, wanted) for position, child in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    arguments = {key: instantiated(f"{subject}.{key}", child, wanted) for key, child in node.items()}
    target = arguments.pop("_target_", None)
    if target is None:
        return arguments
    package, _, name = text(f"{subject}._target_", target).partition(".")
    if package == __package__:
        return _own(subject, name, arguments, wanted)
    return _foreign(subject, target, arguments)


def _own(subject: str, name: str, arguments: Mapping[str, Any], wanted: Wanted) -> Any:
    package = importlib.import_module(__package__)  # when called, not when imported: this is a lower layer
    if name not in package.__all__:
        like = [each for each in package.__all__ if nearest(name, [each]) and wanted.is_ours(getattr(package, each))]
        raise SettingsError(f'{subject}: {__package__} has no {wanted.kind} "{name}"{nearest(name, like)}')
    make = getattr(package, name)
    if not wanted.is_ours(make):
        refuse(subject, f"a {wanted.kind}", f"{__package__}.{name}")
    signature = inspect.signature(make)
    known_keys(f"{subject} ({name})", arguments, list(signature.parameters))
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise SettingsError(f"{subject}: {name}{signature}: {error}") from error
    try:
        return make(**arguments)
    except SettingsError as error:
        raise SettingsError(f"{subject}: {error}") from error


def _foreign(subject: str, target: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import hydra.errors
        import hydra.utils
    except ImportError as error:
        raise SettingsError(
            f"{subject}: {target} is not one of {__package__}'s, and building it takes Hydra: "
            "install jaxckpt-train[hydra], or pass the object to CheckpointCallback"
        ) from error
    try:
        return hydra.utils.instantiate({"_target_": target, **arguments})
    except hydra.errors.InstantiationException as error:
        raise SettingsError(f"{subject}: cannot build {target}: {error}") from error


def notice_list(subject: str, value: Any) -> list[Any]:
    """A list of what `build_notices` takes, as a check of `jaxckpt_train._validation`."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Collection):
        refuse(subject, "a list of sources of notices, such as [slurm]", value)
    for position, one in enumerate(value):
        if isinstance(one, str) and one not in NAMES:
            raise SettingsError(f"{subject}[{position}]: expected {_WANTED}, found {one!r}{nearest(one, NAMES)}")
        if isinstance(one, Mapping) and "_target_" not in one:
            refuse(f"{subject}[{position}]", _WANTED, dict(one))
        if not isinstance(one, (str, Mapping)) and not _is_source(one):
            refuse(f"{subject}[{position}]", _WANTED, one)
    return list(value)


def build_notices(subject: str, value: Any) -> tuple[NoticeSource, ...]:
    """The sources, built where they are only named or described.

    Raises:
        SettingsError: one cannot be built, or is none.
    """
    return tuple(
        _built_notice(f"{subject}[{position}]", one) for position, one in enumerate(notice_list(subject, value))
    )


def _built_notice(subject: str, one: Any) -> NoticeSource:
    source = {"_target_": f"{__package__}.{NAMES[one]}"} if isinstance(one, str) else one
    if isinstance(source, Mapping):
        wanted = Wanted(
            "source of notices", "has start, stop and notice", _is_source, lambda found: hasattr(found, "notice")
        )
        source = instantiated(subject, source, wanted)
    if not _is_source(source):
        refuse(subject, _WANTED, one)
    built: NoticeSource = source
    return built


def _is_source(value: Any) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, method, None)) for method in _METHODS)


@dataclasses.dataclass(kw_only=True)
class StoreConfig:
    """`StoreSettings` in types that YAML and OmegaConf have; the fields are documented there.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    durability: str = "full"
    digest: str = "xxh3-128"
    verify_on_load: bool = True
    segment_bytes: int = 2 << 30
    staging_bytes: int = 96 << 20
    read_budget_bytes: int = 256 << 20
    io_threads: int | str = "auto"
    direct_io: str | bool = "auto"
    snapshot: str = "auto"
    nonfinite: str = "allow"
    scrub_bytes_per_s: int = 0
    read_once: str | bool = "auto"
    barrier_timeout_s: float = 300.0
    colocated: str | bool = "auto"

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> StoreSettings:
        """The settings that the store takes."""
        values: dict[str, Any] = dataclasses.asdict(self)
        try:
            return StoreSettings(**values)
        except SettingsError as error:
            raise SettingsError(str(error).replace("StoreSettings.", f"{_ROOT}.store.", 1)) from error


@dataclasses.dataclass(kw_only=True)
class CheckpointConfig:
    """Everything that `CheckpointCallback` takes, in types that YAML and OmegaConf have. Checks itself when built.

    Attributes:
        directory: of the run. Relative: to where the command was given, also when Hydra changes the directory.
        save_interval_steps: save each step that is a multiple of this; where the loop calls for some steps only, the
            first one after a multiple. None: not by steps. With no reason to save at all, every 600 seconds.
        save_interval_secs: save when this many seconds have passed since the last save; None: not by time.
        temporary_interval_secs: save a temporary step when this many seconds have passed since the last save: one that
            goes once a later step is committed, also by a later job. Then a step that is saved as the job is asked to
            leave is temporary, too. None: none is.
        save_policy: further reasons to save: a node with `_target_: jaxckpt_train.<Policy>`, or an object.
        keep_latest: how many of the newest steps are kept; None: no rule of this kind. With no rule at all everything
            is kept.
        keep_every_steps: steps that are a multiple of this are kept for ever, if they are saved: with saves by time
            take `EveryNSteps(n, exact_interval=False)` as `keep_policy` instead. None: no rule of this kind.
        keep_best: how many steps with the best `best_metric` are kept; None: no rule of this kind. A step without the
            metric stays until a later one has it (`manager.attach_metrics`).
        best_metric: the name of the metric that says which step is better, for `keep_best` and `best_link`, and refused
            without them; None: none does.
        best_mode: "min": lower is better; "max": higher is better; None: "min", and refused for a metric such as
            "accuracy", whose name says that higher is better.
        best_link: have a link `best` in the run's directory that stands for the step with the best `best_metric`, for
            whoever exports it.
        keep_policy: further reasons to keep a step: a node with `_target_: jaxckpt_train.<Policy>`, or an object.
        save_on_exit: save the last step when the loop ends.
        save_on_error: save the last completed update when the loop ends by an exception or Ctrl-C, which is raised all
            the same; not in a job of several processes. The position in the data is taken in every update then. What is
            changed by then is not saved: arrays that were donated, and NNX objects once the next update is under way.
        save_initial: save step 0, the state before training, unless something was restored.
        if_busy: a save is due while the last one is still being written: "wait" for it, or "skip" this one.
        stall_timeout_s: seconds without any progress (a disk that does not answer) after which the last one is not
            waited for any more.
        if_stalled: what is done then: "skip" this one with a warning, or "raise" CheckpointTimeoutError.
        signals: names of the signals that ask the loop to save and leave.
        notice_file: a file whose appearance asks the loop to save and leave; None: none does.
        notices: further sources of requests to save and leave: names ("gce", "aws", "slurm", "kubernetes"), nodes with
            `_target_: jaxckpt_train.<Source>`, or objects as `NoticeSource` describes them. Empty: none.
        max_run_time_s: leave so that the last save ends within this many seconds of when the callback was made; take
            off what your program spends before that. None: no limit.
        grace_period_s: seconds between a request to leave and the end of the process. A save that cannot be committed
            by shortly before is given up, and the process ends by itself. None: not known; a save is waited for.
            `max_run_time_s` is left so much earlier, and has to be longer; None: as early as saves were seen to need,
            30 s as long as none was seen, and never by more than half of it.
        exit_code: of a process that left on request; where it is 0 and no time was left for a save: 1.
        data_on_mismatch: the position of `data` does not fit its iterator, as in a job of another number of processes:
            "error"; "restart": the data begins anew; "skip": so it does, and an element for each completed update is
            taken from it and dropped.
        on_preemption: "exit": SystemExit(exit_code); "raise": Preempted; "auto": raise in a Hydra multirun, else exit.
        fingerprint: says what `data` is; its position is refused under another fingerprint, and so is that of any other
            Grain iterator. None: not compared.
        init_from: what a fresh run takes its state from; used only while the run has no checkpoint of its own: the path
            of a checkpoint, also of Orbax, PyTorch, safetensors or Flax; or `path` with what `load` takes: `only` (the
            rest stays as given), `rename`, `cast`, `missing`, `transforms`. None: the state as given.
        progress: a line on the terminal while saving: True, False, or "auto": only when there is a terminal.
        enabled: False: nothing is saved and nothing is restored.
        store: how bytes are written, checked and read.
        sinks: what is called with each event of the history, as `PrometheusSink`: nodes with `_target_`, or objects.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    directory: str = "checkpoints"
    save_interval_steps: int | None = None
    save_interval_secs: float | None = None
    temporary_interval_secs: float | None = None
    save_policy: Any = None
    keep_latest: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: str | None = None
    best_link: bool = False
    keep_policy: Any = None
    save_on_exit: bool = True
    save_on_error: bool = False
    save_initial: bool = False
    if_busy: str = "wait"
    stall_timeout_s: float = STALL_TIMEOUT_S
    if_stalled: str = "skip"
    signals: list[str] = dataclasses.field(default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGUSR2"])
    notice_file: str | None = None
    notices: list[Any] = dataclasses.field(default_factory=list)
    max_run_time_s: float | None = None
    grace_period_s: float | None = None
    exit_code: int = 75
    data_on_mismatch: str = "error"
    on_preemption: str = "auto"
    fingerprint: str | None = None
    init_from: Any = None
    progress: str | bool = "auto"
    enabled: bool = True
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    sinks: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, _CHECKS[field.name](f"{_ROOT}.{field.name}", getattr(self, field.name)))
        asked = next((name for name in ("keep_best", "best_link") if getattr(self, name)), None)
        if asked is not None and self.best_metric is None:
            raise SettingsError(
                f"{_ROOT}.{asked}: expected {_ROOT}.best_metric with it, the name of the metric that says which step "
                "is better; found none"
            )
        if asked is None and self.best_metric is not None:
            raise SettingsError(
                f"{_ROOT}.best_metric: expected {_ROOT}.keep_best or {_ROOT}.best_link with it, which it is for; found "
                "neither"
            )
        if self.best_metric is not None:
            stated_mode(f"{_ROOT}.best_mode", self.best_mode, self.best_metric)
        limit_s, grace_s = self.max_run_time_s, self.grace_period_s
        if limit_s is not None and grace_s is not None and limit_s <= grace_s:
            kept = f"for which time is left at the end ({grace_s:g} seconds; it may be less)"
            refuse(f"{_ROOT}.max_run_time_s", f"more than {_ROOT}.grace_period_s, {kept}", limit_s)


def _store(subject: str, value: Any) -> StoreConfig:
    if isinstance(value, (StoreConfig, StoreSettings)):
        return StoreConfig(**dataclasses.asdict(value))
    return StoreConfig(**known_keys(subject, value, [field.name for field in dataclasses.fields(StoreConfig)]))


def _sinks(subject: str, value: Any) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        refuse(subject, "a list of sinks: nodes with _target_, or objects that are called with every event", value)
    return list(value)


_CHECKS: dict[str, Check] = {
    "directory": path_text,
    "save_interval_steps": optional(whole(1)),
    "save_interval_secs": optional(seconds),
    "temporary_interval_secs": optional(seconds),
    "save_policy": anything,
    "keep_latest": optional(whole(1)),
    "keep_every_steps": optional(whole(1)),
    "keep_best": optional(whole(1)),
    "best_metric": optional(text),
    "best_mode": optional(one_of("min", "max")),
    "best_link": flag,
    "keep_policy": anything,
    "save_on_exit": flag,
    "save_on_error": flag,
    "save_initial": flag,
    "if_busy": one_of("wait", "skip"),
    "stall_timeout_s": seconds,
    "if_stalled": one_of("skip", "raise"),
    "signals": signals,
    "notice_file": optional(path_text),
    "notices": notice_list,
    "max_run_time_s": optional(seconds),
    "grace_period_s": optional(seconds),
    "exit_code": whole(0, 255),
    "data_on_mismatch": one_of("error", "restart", "skip"),
    "on_preemption": one_of("auto", "exit", "raise"),
    "fingerprint": optional(unicode_text),
    "init_from": optional(initial_state),
    "progress": one_of("auto", True, False),
    "enabled": flag,
    "store": _store,
    "sinks": _sinks,
}


def callback_arguments(config: object = None) -> dict[str, Any]:
    """The keyword arguments of `CheckpointCallback` that a configuration stands for.

    Args:
        config: a CheckpointConfig, a mapping, an OmegaConf node, or None for the defaults.

    Returns:
        One entry for each argument, checked; `store` is a StoreSettings, policies and notices are objects.

    Raises:
        SettingsError: a key is unknown, or a value is missing, out of range or of the wrong type.
    """
    built = _built(config)
    arguments = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}
    arguments["signals"] = tuple(built.signals)
    arguments["notices"] = build_notices(f"{_ROOT}.notices", built.notices)
    arguments["store"] = built.store.settings()
    arguments["save_policy"] = build_policy(f"{_ROOT}.save_policy", built.save_policy, "should_save")
    arguments["sinks"] = build_sinks(f"{_ROOT}.sinks", built.sinks)
    arguments["keep_policy"] = build_policy(f"{_ROOT}.keep_policy", built.keep_policy, "should_preserve")
    return arguments


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise SettingsError if arguments of `CheckpointCallback` are not what a configuration may say too."""
    store = arguments["store"]
    if not isinstance(store, (StoreSettings, type(None))):
        refuse(f"{_ROOT}.store", "a StoreSettings", store)
    CheckpointConfig(**{**arguments, "store": store or StoreConfig()})


def _built(config: object) -> CheckpointConfig:
    if config is None:
        return CheckpointConfig()
    if isinstance(config, CheckpointConfig):
        return dataclasses.replace(config)  # checks again: a field may have been set since
    names = [field.name for field in dataclasses.fields(CheckpointConfig)]
    return CheckpointConfig(**known_keys(_ROOT, _without_omegaconf(config), names))


def _without_omegaconf(config: object) -> object:
    """An OmegaConf node as plain dicts and lists with every interpolation resolved; anything else as it is."""
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(config, omegaconf.Container):
        return config
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or _ROOT
        reason = str(error).partition("\n")[0]
        raise SettingsError(f"{key}: cannot be resolved: {reason}; give it a value, as by {key}=...") from error
