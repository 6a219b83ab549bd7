"""The configuration of `CheckpointCallback`, stated once.

`CallbackOptions` has each option with its type, check, default and description. The arguments of the callback, the
keys in YAML, the schema for Hydra and docs/reference/settings.md derive from it.

This module imports neither Hydra nor OmegaConf. If the program has imported them, it recognises their objects.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from jaxckpt_train._validation import (
    absolute_path,
    check_fields,
    is_url,
    known_keys,
    leaf_patterns,
    list_of,
    nearest,
    path_text,
    refuse,
    seconds,
    signal_names,
    stated_mode,
    text,
    unicode_text,
    whole,
)
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.metrics.events import Owned, Sink
from jaxckpt_train.settings import (
    STALL_TIMEOUT_S,
    FastTierSettings,
    ObjectStoreSettings,
    StoreSettings,
    check_fast_tier,
    check_object_store,
)

if TYPE_CHECKING:
    from jaxckpt_train.policies.context import PreservationPolicy, SavePolicy
    from jaxckpt_train.preemption.sources import NoticeSource
else:  # these modules import numpy, and a configuration is checked without it
    NoticeSource = PreservationPolicy = SavePolicy = Any

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
_ROOT = "checkpoint"
_LONGEST_JOB_NAME = 100
_INIT_FROM_OPTIONS = ("only", "rename", "cast", "missing", "transforms")
NAMES = {"gce": "GceNotice", "aws": "AwsNotice", "slurm": "SlurmNotice", "kubernetes": "KubernetesNotice"}


def check_init_from(subject: str, value: Any) -> Any:
    """Check `init_from`: a path, or a mapping with `path` and options of `jaxckpt_train.load`."""
    if not isinstance(value, Mapping):
        return path_text(subject, value)
    # These modules import JAX, which a configuration without a mapping does not need.
    from jaxckpt_train.pytree.restore import LoadOptions
    from jaxckpt_train.transforms.apply import parse_operations

    given = known_keys(subject, value, ("path", *_INIT_FROM_OPTIONS))
    if "path" not in given:
        raise SettingsError(
            f'{subject}: expected the key "path" with the path of a checkpoint, found {", ".join(given) or "nothing"}'
        )
    checked = {"path": path_text(f"{subject}.path", given.pop("path")), **given}
    checked["transforms"] = parse_operations(f"{subject}.transforms", given.get("transforms"))
    try:
        LoadOptions(**{name: option for name, option in given.items() if name != "transforms"})
    except SettingsError as error:
        raise SettingsError(f"{subject}: {error}") from error
    return checked


def check_store(subject: str, value: Any) -> StoreSettings:
    """Check for a StoreSettings, or a mapping with its fields."""
    if isinstance(value, StoreSettings):
        return value
    if not isinstance(value, Mapping):
        refuse(subject, "a StoreSettings, or a mapping with its fields", type(value).__name__)
    try:
        return StoreSettings(**known_keys(subject, value, [field.name for field in dataclasses.fields(StoreSettings)]))
    except SettingsError as error:
        raise SettingsError(str(error).replace("StoreSettings.", f"{subject}.", 1)) from error


Node = Mapping[str, Any]  # with the key `_target_`
PathLike = Annotated[str | os.PathLike[str], path_text]
Text = Annotated[str, text]
Count = Annotated[int, whole(1)]
Seconds = Annotated[float, seconds]


@dataclasses.dataclass(frozen=True)
class CallbackOptions:
    """The arguments of `CheckpointCallback`. An instance checks its values when it is created.

    Attributes:
        directory: the directory of the run, or its URL in an object store (`s3://bucket/run`, `gs://`, `az://`). A
            relative path starts in the directory where the command was given, even if Hydra changes the working
            directory.
        save_interval_steps: save each step that is a multiple of this number. If the loop calls the callback only for
            some steps, save the first step after each multiple. None: do not save by steps. Without any save option,
            the callback saves every 600 seconds.
        save_interval_secs: save when this many seconds have passed since the last save. None: do not save by time.
        temporary_interval_secs: save a temporary step when this many seconds have passed since the last save. A
            temporary step is deleted once a later step is committed, also by a later job. With this option, a step
            saved because of a preemption is temporary too. None: no temporary steps.
        save_policy: an additional save policy: an object, or a node with `_target_: jaxckpt_train.<Policy>`.
        keep_latest: keep this many of the newest steps. None: no such rule. Without any keep option, every step is
            kept.
        keep_every_steps: keep each saved step that is a multiple of this number for ever. If you save by time, use
            `EveryNSteps(n, exact_interval=False)` as `keep_policy` instead. None: no such rule.
        keep_best: keep this many steps with the best `best_metric`. A step without the metric is kept until a later
            step has it (see `manager.attach_metrics`). None: no such rule.
        best_metric: the name of the metric that decides which step is better. It requires `keep_best` or `best_link`.
            None: no metric.
        best_mode: "min" if lower is better, "max" if higher is better. None means "min", but is refused for a metric
            such as "accuracy", whose name says that higher is better.
        best_link: maintain a link `best` in the run's directory that points to the step with the best `best_metric`,
            for example for an export.
        keep_policy: an additional preservation policy: an object, or a node with `_target_: jaxckpt_train.<Policy>`.
        frozen: patterns of the paths of leaves that never change, such as "base/**": one or a list. A save writes them
            to files of their own, and later ones take these over. Leaves that happen not to change are found without
            it, a save or two later. None: no such leaves.
        fast_tier: save more often to a directory of each host, from where the steps that are due by the options above
            are copied to `directory`: a FastTierSettings, a mapping with its fields, or only its directory. None, or
            fields with a directory of None: save to `directory` alone.
        save_on_exit: save the last step when the loop ends.
        save_on_error: save the last completed update when the loop ends with an exception or Ctrl-C. The exception is
            raised as usual. Has no effect in a multi-process job. The callback then records the position in the data at
            each update. Values that the next update has already changed are not saved: donated arrays, and NNX objects
            once the next update is running.
        save_initial: save step 0, the state before training, unless a step was restored.
        if_busy: what to do if a save is due while the previous one is still being written: "wait" for it, or "skip" the
            new one.
        stall_timeout_s: stop waiting for the previous save after this many seconds without any progress, for example
            if the disk does not answer.
        if_stalled: what to do then: "skip" the new save with a warning, or "raise" CheckpointTimeoutError.
        signals: the names of the signals that ask the loop to save and stop.
        notice_file: a file that asks the loop to save and stop when it appears. None: no such file.
        notices: additional sources of preemption notices: names ("gce", "aws", "slurm", "kubernetes"), nodes with
            `_target_: jaxckpt_train.<Source>`, or objects that implement `NoticeSource`.
        max_run_time_s: stop in time for the last save to end within this many seconds after the callback was created.
            Subtract the time that the program needs before that. None: no limit.
        grace_period_s: the seconds between a request to stop and the end of the process. A save that cannot commit
            shortly before the end is abandoned, and the process exits by itself. None: the period is unknown, and the
            callback waits for the save. With `max_run_time_s`, which must be longer, the loop stops this many seconds
            before that limit. If None, it stops as early as past saves have needed, or 30 seconds early before the
            first save, but never earlier than half of the limit.
        exit_code: the exit code of a process that stopped on request. If this is 0 and there was no time to save, the
            exit code is 1.
        data_on_mismatch: what to do if the saved position of `data` does not fit its iterator, for example because the
            job has another number of processes. "error": raise the error. "restart": start the data from the beginning.
            "skip": start the data from the beginning, then take and drop one element for each completed update.
        on_preemption: "exit" raises SystemExit(exit_code), "raise" raises Preempted, and "auto" raises Preempted in a
            Hydra multirun and SystemExit elsewhere.
        fingerprint: a text that identifies the data. A saved position of `data`, or of any other Grain iterator, is
            refused if its fingerprint differs. None: do not compare.
        init_from: where a run without a checkpoint takes its state from: the path of a checkpoint, also one of Orbax,
            PyTorch, safetensors or Flax, or a mapping with `path` and the options of `load`: `only` (other leaves keep
            their values), `rename`, `cast`, `missing`, `transforms`. None: use the state that was passed.
        progress: show a progress line on the terminal: True, False, or "auto" for only if there is a terminal.
        enabled: False disables the callback: nothing is saved or restored.
        store: how bytes are written, checked and read: a StoreSettings, in YAML a node with its fields. None: its
            defaults.
        object_store: how the object store of a URL is reached: an ObjectStoreSettings, in YAML a node with its fields.
            The same as `store.object_store`. None: the defaults.
        sinks: receivers of each event of the history, such as `PrometheusSink`: nodes with `_target_`, or objects.

    Raises:
        SettingsError: a value is out of range or of the wrong type.
    """

    directory: PathLike
    _: dataclasses.KW_ONLY
    save_interval_steps: Count | None = None
    save_interval_secs: Seconds | None = None
    temporary_interval_secs: Seconds | None = None
    save_policy: SavePolicy | Node | None = None
    keep_latest: Count | None = None
    keep_every_steps: Count | None = None
    keep_best: Count | None = None
    best_metric: Text | None = None
    best_mode: Literal["min", "max"] | None = None
    best_link: bool = False
    keep_policy: PreservationPolicy | Node | None = None
    frozen: Annotated[str | Sequence[str], leaf_patterns] | None = None
    fast_tier: Annotated[FastTierSettings, _check_fast_tier] | None = None
    save_on_exit: bool = True
    save_on_error: bool = False
    save_initial: bool = False
    if_busy: Literal["wait", "skip"] = "wait"
    stall_timeout_s: Seconds = STALL_TIMEOUT_S
    if_stalled: Literal["skip", "raise"] = "skip"
    signals: Annotated[Sequence[str], signal_names] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    notice_file: PathLike | None = None
    notices: Annotated[Sequence[str | NoticeSource | Node], list_of("notice sources, such as [slurm]")] = ()
    max_run_time_s: Seconds | None = None
    grace_period_s: Seconds | None = None
    exit_code: Annotated[int, whole(0, 255)] = 75
    data_on_mismatch: Literal["error", "restart", "skip"] = "error"
    on_preemption: Literal["exit", "raise", "auto"] = "auto"
    fingerprint: Annotated[str, unicode_text] | None = None
    init_from: Annotated[str | os.PathLike[str] | Mapping[str, Any], check_init_from] | None = None
    progress: bool | Literal["auto"] = "auto"
    enabled: bool = True
    store: Annotated[StoreSettings, check_store] | None = None
    object_store: Annotated[ObjectStoreSettings, check_object_store] | None = None
    sinks: Annotated[Sequence[Sink | Node], list_of("sinks, which are called with every event")] = ()

    def __post_init__(self) -> None:
        check_fields(_ROOT, self)
        self._join_object_store()
        needs_metric = next((name for name in ("keep_best", "best_link") if getattr(self, name)), None)
        if needs_metric is not None and self.best_metric is None:
            raise SettingsError(
                f"{_ROOT}.{needs_metric}: expected {_ROOT}.best_metric, the name of the metric that decides which step "
                "is better; found none"
            )
        if needs_metric is None and self.best_metric is not None:
            raise SettingsError(
                f"{_ROOT}.best_metric: has no effect without {_ROOT}.keep_best or {_ROOT}.best_link; set one of them, "
                "or remove best_metric"
            )
        if self.best_metric is not None:
            stated_mode(f"{_ROOT}.best_mode", self.best_mode, self.best_metric)
        limit_s, grace_s = self.max_run_time_s, self.grace_period_s
        if limit_s is not None and grace_s is not None and limit_s <= grace_s:
            refuse(
                f"{_ROOT}.max_run_time_s", f"more than {_ROOT}.grace_period_s, which is {grace_s:g} seconds", limit_s
            )

    def _join_object_store(self) -> None:
        """Make `object_store` a part of `store`, unless that has its own."""
        given, store = self.object_store, self.store or StoreSettings()
        if given is None or given in (store.object_store, ObjectStoreSettings()):
            return
        if store.object_store != ObjectStoreSettings():
            raise SettingsError(
                f"{_ROOT}.object_store: expected this or {_ROOT}.store.object_store, found both: remove one of them"
            )
        object.__setattr__(self, "store", dataclasses.replace(store, object_store=given))

    def built(self) -> Self:
        """Return a copy in which nodes with `_target_`, and names of notice sources, are replaced by their objects."""
        return dataclasses.replace(
            self,
            save_policy=_build_policy("save_policy", self.save_policy, "should_save"),
            keep_policy=_build_policy("keep_policy", self.keep_policy, "should_preserve"),
            notices=[_build(f"notices[{at}]", each, _NOTICE) for at, each in enumerate(self.notices)],
            sinks=[
                Owned(sink) if isinstance(each, Mapping) else sink  # a sink of a node is closed with the run
                for at, each in enumerate(self.sinks)
                for sink in [_build(f"sinks[{at}]", each, _SINK)]
            ],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CallbackOptions):
    """The options of a callback with a default for the directory, as `CheckpointCallback.from_config` takes them."""

    directory: PathLike = "checkpoints"


def takes_fields_of(options: Callable[P, T]) -> Callable[[Callable[[S, T], None]], Callable[Concatenate[S, P], None]]:
    """Let a method that takes options take their fields as arguments: with the same names, types and defaults."""

    def decorate(method: Callable[[S, T], None]) -> Callable[Concatenate[S, P], None]:
        @functools.wraps(method, assigned=("__doc__", "__module__", "__name__", "__qualname__"))
        def with_fields(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            method(self, options(*args, **kwargs))

        hints, signature = typing.get_type_hints(options), inspect.signature(options)
        found = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(with_fields)["__signature__"] = inspect.Signature([first, *found], return_annotation=None)
        return with_fields

    return decorate


def callback_arguments(config: object = None) -> dict[str, Any]:
    """Convert a CheckpointConfig, a mapping, an OmegaConf node, or None to the arguments of `CheckpointCallback`.

    Policies, notices and sinks are objects.
    """
    if not isinstance(config, CallbackOptions):
        names = [field.name for field in dataclasses.fields(CheckpointConfig)]
        config = CheckpointConfig(**known_keys(_ROOT, {} if config is None else _without_omegaconf(config), names))
    return dict(vars(config.built()))


@functools.cache
def config_schema() -> type:
    """Return a dataclass like `CheckpointConfig` that can be changed, in the types that OmegaConf knows.

    Hydra has it as `checkpoint/base_checkpoint`. Use it in a typed configuration of your own.
    """
    objects = _schema_of(ObjectStoreSettings, "ObjectStoreConfig")
    store = _schema_of(StoreSettings, "StoreConfig", object_store=objects)
    tier = _schema_of(FastTierSettings, "FastTierConfig")
    return _schema_of(CheckpointConfig, "CheckpointConfig", store=store, object_store=objects, fast_tier=tier)


def _schema_of(settings: type, name: str, **nested: type) -> type:
    hints, fields = typing.get_type_hints(settings), list[Any]()
    for field in dataclasses.fields(settings):
        make, kind = nested.get(field.name), _omegaconf_type(hints[field.name])
        if make is not None:
            fields.append((field.name, make, dataclasses.field(default_factory=make)))
        elif field.default_factory is not dataclasses.MISSING:
            fields.append((field.name, dict[str, str], dataclasses.field(default_factory=field.default_factory)))
        elif isinstance(field.default, tuple):
            make_list: Any = functools.partial(list, field.default)
            fields.append((field.name, list[Any], dataclasses.field(default_factory=make_list)))
        elif field.default is dataclasses.MISSING:  # null: not configured
            fields.append((field.name, Any, None))
        else:
            fields.append((field.name, kind, field.default))
    return dataclasses.make_dataclass(name, fields, kw_only=True)


def _omegaconf_type(hint: Any) -> Any:
    """The type of a field as OmegaConf knows it: paths and choices are text, and what it does not know is anything."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    is_text = [each == os.PathLike[str] or typing.get_origin(each) is Literal for each in parts]
    kinds = {str if is_str else each for each, is_str in zip(parts, is_text, strict=True)} - {types.NoneType}
    if len(kinds) > 1 or not kinds <= {bool, int, float, str}:
        return Any
    return kinds.pop() | None if types.NoneType in parts else kinds.pop()


def _without_omegaconf(config: object) -> object:
    """Convert an OmegaConf node to plain dicts and lists with all interpolations resolved; return others unchanged."""
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(config, omegaconf.Container):
        return config
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or _ROOT
        reason = str(error).partition("\n")[0]
        raise SettingsError(f"{key}: cannot be resolved: {reason}; set its value, as by {key}=...") from error


def path_and_options(init_from: Any) -> tuple[Any, dict[str, Any]]:
    """Split a checked `init_from` into the path and the keyword arguments of `jaxckpt_train.load`."""
    if not isinstance(init_from, dict):
        return init_from, {}
    return init_from["path"], {name: option for name, option in init_from.items() if name != "path"}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The kind of object that an option, or a node with `_target_`, must be."""

    name: str  # in one or a few words, for messages
    expected: str  # what an option of this kind may be, for messages
    accepts: Callable[[Any], bool]  # whether an object is of this kind
    is_public: Callable[[Any], bool]  # whether a public name makes such an object, also inside another node


_SINK = _Kind(
    "sink",
    "a node with _target_, or an object, that is called with every event",
    callable,
    lambda found: getattr(found, "__module__", "") == __package__ and getattr(found, "__name__", "").endswith("Sink"),
)
_NOTICE = _Kind(
    "notice source",
    f"one of {', '.join(map(repr, NAMES))}, a node with _target_, or an object with start, stop and notice",
    lambda found: all(callable(getattr(found, name, None)) for name in ("start", "stop", "notice")),
    lambda found: hasattr(found, "notice"),
)


def _build_policy(name: str, value: Any, method: str) -> Any:
    kind = _Kind(
        "policy",
        f"a node with _target_, or an object, that has {method}(...)",
        lambda found: callable(getattr(found, method, None)),
        lambda found: hasattr(found, "should_save") or hasattr(found, "should_preserve"),
    )
    return None if value is None else _build(name, value, kind)


def _build(name: str, value: Any, kind: _Kind) -> Any:
    """Return the object that the value of an option is or describes."""
    subject, made = f"{_ROOT}.{name}", value
    if isinstance(value, str) and kind is _NOTICE:
        if value not in NAMES:
            raise SettingsError(f"{subject}: expected {kind.expected}, found {value!r}{nearest(value, NAMES)}")
        made = {"_target_": f"{__package__}.{NAMES[value]}"}
    if isinstance(made, Mapping):
        made = _instantiate(subject, made, kind)
    if isinstance(made, type) or not kind.accepts(made):
        refuse(subject, kind.expected, value)
    return made


def _instantiate(subject: str, node: Any, kind: _Kind) -> Any:
    """Build a node, and first everything inside it that has a `_target_`."""
    if isinstance(node, (list, tuple)):
        return [_instantiate(f"{subject}[{position}]", child, kind) for position, child in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    arguments = {key: _instantiate(f"{subject}.{key}", child, kind) for key, child in node.items()}
    target = arguments.pop("_target_", None)
    if target is None:
        return arguments
    package, _, name = text(f"{subject}._target_", target).partition(".")
    if package == __package__:
        return _instantiate_own(subject, name, arguments, kind)
    return _instantiate_with_hydra(subject, target, arguments)


def _instantiate_own(subject: str, name: str, arguments: Mapping[str, Any], kind: _Kind) -> Any:
    package = importlib.import_module(__package__)  # imported late: the package imports this module
    if name not in package.__all__:
        raise SettingsError(f'{subject}: {__package__} has no {kind.name} "{name}"{nearest(name, package.__all__)}')
    make = getattr(package, name)
    if not kind.is_public(make):
        refuse(subject, f"a {kind.name}", f"{__package__}.{name}")
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


def _instantiate_with_hydra(subject: str, target: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import hydra.errors
        import hydra.utils
    except ImportError as error:
        raise SettingsError(
            f"{subject}: {target} is not a class of {__package__}, and Hydra, which would build it, is not installed: "
            "install jaxckpt-train[hydra], or pass the object to CheckpointCallback"
        ) from error
    try:
        return hydra.utils.instantiate({"_target_": target, **arguments})
    except hydra.errors.InstantiationException as error:
        raise SettingsError(f"{subject}: cannot build {target}: {error}") from error


def _check_fast_tier(subject: str, value: Any) -> FastTierSettings | None:
    """As `check_fast_tier`; a relative directory starts as for `resolve_directory`."""
    return check_fast_tier(subject, value, _hydra_value("runtime", "cwd") or "")


def resolve_directory(directory: str | os.PathLike[str]) -> str:
    """Return the absolute path of a run directory, or its URL.

    A relative path starts in the directory where the user gave the command. Under Hydra that is its original working
    directory, regardless of `hydra.job.chdir`.
    """
    return absolute_path(f"{_ROOT}.directory", directory, _hydra_value("runtime", "cwd") or "")


def run_directory(directory: str | os.PathLike[str]) -> str:
    """Return the resolved directory, extended by `job_name()`, so that no job of a multirun continues another one."""
    name = job_name()
    return f"{resolve_directory(directory)}/{name}" if name else resolve_directory(directory)


def hydra_directory_problem(directory: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with this run directory in the running Hydra job, or None."""
    output, path = _hydra_value("runtime", "output_dir"), resolve_directory(directory)
    if output is None or is_url(path) or not PurePath(path).is_relative_to(output):
        return None
    kind = "sweep" if is_multirun() else "run"
    template = str(sys.modules["omegaconf"].OmegaConf.to_container(_hydra_value(kind), resolve=False))
    if "${now" not in template:  # each run has the same folder
        return None
    return (
        f"{_ROOT}.directory: {path} is in the output folder of this Hydra run. Hydra creates a new output folder for "
        f"each run, so the same command will not find these checkpoints and will start from scratch. Set "
        f"{_ROOT}.directory to a path outside {output}, or set hydra.{kind}.dir to a path without a time in it"
    )


def is_multirun() -> bool:
    """Return whether this process runs a job of a Hydra multirun (`--multirun`)."""
    return getattr(_hydra_value("mode"), "name", None) == "MULTIRUN"


def job_name() -> str:
    """Return a directory name made from the job's overrides in a Hydra multirun, and an empty string elsewhere."""
    if not is_multirun():
        return ""
    overrides = _hydra_value("overrides", "task") or ()
    whole = ",".join(sorted(item for item in overrides if item.partition("=")[0].lstrip("+~") != f"{_ROOT}.directory"))
    plain = re.sub(r"[^A-Za-z0-9._=,+-]", "_", whole)
    if plain == whole and len(plain) <= _LONGEST_JOB_NAME:
        return plain
    return f"{plain[:_LONGEST_JOB_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _hydra_value(*path: str) -> Any:
    """Return a value of the running Hydra job's own configuration, or None if it is not set or no Hydra job runs."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    node = module.HydraConfig.get()
    for name in path:
        node = None if node is None else node.get(name)
    return node
