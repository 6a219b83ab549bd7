"""Builds the policies that a configuration names by `_target_`: ours by ourselves, any other through Hydra."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.value_checks import known_keys, nearest, refuse, text


def build_policy(subject: str, value: Any, method: str) -> Any:
    """None, or an object with the method, built first if `value` is a node with `_target_`."""
    if value is None:
        return None
    policy = _instantiated(subject, value) if isinstance(value, Mapping) else value
    if isinstance(policy, type) or not callable(getattr(policy, method, None)):
        refuse(subject, f"a node with _target_, or an object, that has {method}(...)", value)
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
    package, _, name = text(f"{subject}._target_", target).partition(".")
    if package == __package__:
        return _own_policy(subject, name, arguments)
    return _foreign_policy(subject, target, arguments)


def _own_policy(subject: str, name: str, arguments: Mapping[str, Any]) -> Any:
    package = importlib.import_module(__package__)  # when called, not when imported: this is a lower layer
    if name not in package.__all__:
        raise SettingsError(f'{subject}: {__package__} has no policy "{name}"{nearest(name, package.__all__)}')
    policy = getattr(package, name)
    if not (hasattr(policy, "should_save") or hasattr(policy, "should_preserve")):
        refuse(subject, "a policy", f"{__package__}.{name}")
    signature = inspect.signature(policy)
    known_keys(f"{subject} ({name})", arguments, list(signature.parameters))
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
