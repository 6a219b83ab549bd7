"""Builds the objects that a configuration names by `_target_`: ours by ourselves, any other through Hydra."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.sinks.feed import Owned, Sink
from jaxckpt_train.value_checks import known_keys, nearest, refuse, text


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
    return None if value is None else _built(subject, value, wanted)


def build_sinks(subject: str, values: list[Any]) -> tuple[Sink, ...]:
    """The sinks of a list; one that is a node with `_target_` is built first, and closed with the run."""

    def is_ours(found: Any) -> bool:
        module, name = str(getattr(found, "__module__", "")), str(getattr(found, "__name__", ""))
        return module.startswith(f"{__package__}.sinks.") or (module == __package__ and name.endswith("Sink"))

    wanted = Wanted("sink", "is called with every event", callable, is_ours)
    sinks = []
    for position, value in enumerate(values):
        sink = _built(f"{subject}[{position}]", value, wanted)
        sinks.append(Owned(sink) if isinstance(value, Mapping) else sink)
    return tuple(sinks)


def _built(subject: str, value: Any, wanted: Wanted) -> Any:
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
