"""The callback's configuration as YAML has it: typed, checked, and sure of its directory under Hydra.

Neither Hydra nor OmegaConf is imported: what they made is recognised when they are already there.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import inspect
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.settings import StoreSettings

_ROOT = "checkpoint"
_LONGEST_JOB_NAME = 100
_Check = Callable[[str, Any], Any]


def _refuse(subject: str, expected: str, found: object) -> NoReturn:
    raise SettingsError(f"{subject}: expected {expected}, found {found!r}")


def _text(subject: str, value: Any) -> str:
    return value if isinstance(value, str) and value else _refuse(subject, "text that is not empty", value)


def _flag(subject: str, value: Any) -> bool:
    return value if isinstance(value, bool) else _refuse(subject, "true or false", value)


def _seconds(subject: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value)
    _refuse(subject, "a finite number of seconds above 0", value)


def _whole(least: int, most: float = math.inf) -> _Check:
    wanted = f"a whole number of at least {least}" if most == math.inf else f"a whole number from {least} to {most}"

    def check(subject: str, value: Any) -> int:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return int(value) if fits else _refuse(subject, wanted, value)

    return check


def _one_of(*choices: str | bool) -> _Check:
    wanted = "one of " + ", ".join(map(repr, choices))

    def check(subject: str, value: Any) -> str | bool:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        _refuse(subject, wanted, value)

    return check


def _optional(check: _Check) -> _Check:
    return lambda subject, value: None if value is None else check(subject, value)


def _signals(subject: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Collection):
        _refuse(subject, "a list of names of signals, such as [SIGTERM]", value)
    catchable = sorted(item.name for item in signal.Signals if item.name not in ("SIGKILL", "SIGSTOP"))
    for name in value:
        if name not in catchable:
            _refuse(subject, "names of signals that a process can catch, such as SIGTERM", name)
    return list(value)


def _any(subject: str, value: Any) -> Any:
    return value


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
    staging_bytes: int = 64 << 20
    read_budget_bytes: int = 256 << 20
    io_threads: int = 2
    direct_io: str | bool = "auto"

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> StoreSettings:
        """The settings that the store takes."""
        values: dict[str, Any] = dataclasses.asdict(self)
        return StoreSettings(**values)


@dataclasses.dataclass(kw_only=True)
class CheckpointConfig:
    """Everything that `CheckpointCallback` takes, in types that YAML and OmegaConf have. Checks itself when built.

    Attributes:
        directory: of the run. Relative: to where the command was given, also when Hydra changes the directory.
        save_interval_steps: save each step that is a multiple of this; None: not by steps.
        save_interval_secs: save when this many seconds have passed since the last save; None: not by time.
        save_policy: further reasons to save: a node with `_target_: jaxckpt_train.<Policy>`, or an object.
        keep_latest: how many of the newest steps are kept; None: no rule of this kind.
        keep_every_steps: steps that are a multiple of this are kept for ever; None: no rule of this kind.
        keep_best: how many steps with the best `best_metric` are kept; None: no rule of this kind.
        best_metric: the name of the metric that says which step is better; None: none does.
        best_mode: "min": lower is better; "max": higher is better.
        keep_policy: further reasons to keep a step: a node with `_target_: jaxckpt_train.<Policy>`, or an object.
        save_on_exit: save the last step when the loop ends.
        save_initial: save step 0, the state before training, unless something was restored.
        if_busy: a save is due while the last one is still being written: "wait" for it, or "skip" this one.
        signals: names of the signals that ask the loop to save and leave.
        notice_file: a file whose appearance asks the loop to save and leave; None: none does.
        max_run_time_s: leave so that the last save ends within this many seconds of the start; None: no limit.
        grace_period_s: seconds between a request to leave and the end of the process.
        exit_code: of a process that left on request.
        on_preemption: "exit": SystemExit(exit_code); "raise": Preempted; "auto": raise in a Hydra multirun, else exit.
        fingerprint: says what data this is; a restore with another fingerprint is refused. None: not compared.
        progress: a line on the terminal while saving: True, False, or "auto": only when there is a terminal.
        enabled: False: nothing is saved and nothing is restored.
        store: how bytes are written, checked and read.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    directory: str = "checkpoints"
    save_interval_steps: int | None = None
    save_interval_secs: float | None = None
    save_policy: Any = None
    keep_latest: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"
    keep_policy: Any = None
    save_on_exit: bool = True
    save_initial: bool = False
    if_busy: str = "wait"
    signals: list[str] = dataclasses.field(default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGUSR2"])
    notice_file: str | None = None
    max_run_time_s: float | None = None
    grace_period_s: float = 30.0
    exit_code: int = 75
    on_preemption: str = "auto"
    fingerprint: str | None = None
    progress: str | bool = "auto"
    enabled: bool = True
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, _CHECKS[field.name](f"{_ROOT}.{field.name}", getattr(self, field.name)))
        if self.keep_best is not None and self.best_metric is None:
            raise SettingsError(
                f"{_ROOT}.keep_best: expected {_ROOT}.best_metric with it, the name of the metric that says which step "
                "is better; found none"
            )
        if self.max_run_time_s is not None and self.max_run_time_s <= self.grace_period_s:
            longer = f"more than {_ROOT}.grace_period_s ({self.grace_period_s:g} seconds)"
            _refuse(f"{_ROOT}.max_run_time_s", longer, self.max_run_time_s)


def _store(subject: str, value: Any) -> StoreConfig:
    if isinstance(value, (StoreConfig, StoreSettings)):
        return StoreConfig(**dataclasses.asdict(value))
    return StoreConfig(**_known_keys(subject, value, [field.name for field in dataclasses.fields(StoreConfig)]))


_CHECKS: dict[str, _Check] = {
    "directory": _text,
    "save_interval_steps": _optional(_whole(1)),
    "save_interval_secs": _optional(_seconds),
    "save_policy": _any,
    "keep_latest": _optional(_whole(1)),
    "keep_every_steps": _optional(_whole(1)),
    "keep_best": _optional(_whole(1)),
    "best_metric": _optional(_text),
    "best_mode": _one_of("min", "max"),
    "keep_policy": _any,
    "save_on_exit": _flag,
    "save_initial": _flag,
    "if_busy": _one_of("wait", "skip"),
    "signals": _signals,
    "notice_file": _optional(_text),
    "max_run_time_s": _optional(_seconds),
    "grace_period_s": _seconds,
    "exit_code": _whole(0, 255),
    "on_preemption": _one_of("auto", "exit", "raise"),
    "fingerprint": _optional(_text),
    "progress": _one_of("auto", True, False),
    "enabled": _flag,
    "store": _store,
}


def callback_arguments(config: object = None) -> dict[str, Any]:
    """The keyword arguments of `CheckpointCallback` that a configuration stands for.

    Args:
        config: a CheckpointConfig, a mapping, an OmegaConf node, or None for the defaults.

    Returns:
        One entry for each argument, checked; `store` is a StoreSettings, policies are objects. In a Hydra multirun
        `directory` ends with a name made from the job's overrides: two jobs must never continue each other.

    Raises:
        SettingsError: a key is unknown, or a value is missing, out of range or of the wrong type.
    """
    built = _built(config)
    arguments = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}
    if job := _job_name():
        arguments["directory"] = os.path.join(built.directory, job)
    arguments["signals"] = tuple(built.signals)
    arguments["store"] = built.store.settings()
    arguments["save_policy"] = _policy(f"{_ROOT}.save_policy", built.save_policy, "should_save")
    arguments["keep_policy"] = _policy(f"{_ROOT}.keep_policy", built.keep_policy, "should_preserve")
    return arguments


def _built(config: object) -> CheckpointConfig:
    if config is None:
        return CheckpointConfig()
    if isinstance(config, CheckpointConfig):
        return dataclasses.replace(config)  # checks again: a field may have been set since
    names = [field.name for field in dataclasses.fields(CheckpointConfig)]
    return CheckpointConfig(**_known_keys(_ROOT, _without_omegaconf(config), names))


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


def _known_keys(subject: str, value: object, valid: Collection[str]) -> dict[str, Any]:
    """`value` as keyword arguments, if it is a mapping with no other keys than the valid ones."""
    if not isinstance(value, Mapping):
        _refuse(subject, "a mapping", value)
    for key in value:
        if key not in valid:
            raise SettingsError(f'{subject}: unknown key "{key}"{_nearest(key, valid)}; valid keys: {", ".join(valid)}')
    return dict(value)


def _nearest(name: object, valid: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), valid)
    return ", did you mean " + " or ".join(f'"{one}"' for one in near) + "?" if near else ""


def _policy(subject: str, value: Any, method: str) -> Any:
    """None, or an object with the method, built first if `value` is a node with `_target_`."""
    if value is None:
        return None
    policy = _instantiated(subject, value) if isinstance(value, Mapping) else value
    if isinstance(policy, type) or not callable(getattr(policy, method, None)):
        _refuse(subject, f"a node with _target_, or an object, that has {method}(...)", value)
    return policy


def _instantiated(subject: str, node: Any) -> Any:
    if isinstance(node, (list, tuple)):
        return [_instantiated(f"{subject}[{position}]", child) for position, child in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    arguments = {key: _instantiated(f"{subject}.{key}", child) for key, child in node.items()}
    target = arguments.pop("_target_", None)
    if target is None:
        return arguments
    package, _, name = _text(f"{subject}._target_", target).partition(".")
    if package == __package__:
        return _own_policy(subject, name, arguments)
    return _foreign_policy(subject, target, arguments)


def _own_policy(subject: str, name: str, arguments: Mapping[str, Any]) -> Any:
    package = importlib.import_module(__package__)  # when called, not when imported: this is a lower layer
    if name not in package.__all__:
        raise SettingsError(f'{subject}: {__package__} has no policy "{name}"{_nearest(name, package.__all__)}')
    policy = getattr(package, name)
    if not (hasattr(policy, "should_save") or hasattr(policy, "should_preserve")):
        _refuse(subject, "a policy", f"{__package__}.{name}")
    signature = inspect.signature(policy)
    _known_keys(f"{subject} ({name})", arguments, list(signature.parameters))
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise SettingsError(f"{subject}: {name}{signature}: {error}") from error
    return policy(**arguments)


def _foreign_policy(subject: str, target: str, arguments: Mapping[str, Any]) -> Any:
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


def resolve_directory(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a run directory.

    Args:
        directory: `~` is the user's home; a relative path starts where the command was given: under Hydra in its
            original working directory, whatever `hydra.job.chdir` says, else in the working directory.

    Raises:
        SettingsError: it is a URL.
    """
    text = os.fspath(directory)
    if "://" in text:
        _refuse(f"{_ROOT}.directory", "a path of the file system: other stores cannot be written yet", text)
    return Path(_hydra_value("runtime", "cwd") or Path.cwd(), Path(text).expanduser()).absolute()


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


def _job_name() -> str:
    """In a Hydra multirun, a directory name made from the job's overrides; empty elsewhere."""
    if not is_multirun():
        return ""
    ignored = {f"{_ROOT}.directory", *(_hydra_value("job", "config", "override_dirname", "exclude_keys") or ())}
    overrides = _hydra_value("overrides", "task") or ()
    whole = ",".join(sorted(one for one in overrides if one.partition("=")[0].lstrip("+~") not in ignored))
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
