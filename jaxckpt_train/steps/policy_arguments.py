"""Checks of the arguments that save policies and preservation policies are built with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.value_checks import refuse, whole


def whole_number(subject: str, value: object, least: int) -> int:
    """`value` as an int of at least `least`; those of numpy and JAX are taken, bool and 500.0 are not."""
    found: int = whole(least)(subject, value)
    return found


def positive_seconds(subject: str, value: object) -> float:
    """`value` as a finite number of seconds above 0; an int stays an int."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise SettingsError(f"{subject}: expected a finite number of seconds above 0, found {value!r}")


def metric_name(subject: str, value: object) -> str:
    """`value` as the name of a metric: text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise SettingsError(f'{subject}: expected the name of a metric, such as "loss", found {value!r}')


def step_collection(subject: str, value: object) -> Collection[int]:
    """`value` as steps that can be asked `in` fast: a range as it is, anything else as a frozenset."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(f"{subject}: expected a collection of steps, such as [100, 1000], found {value!r}")
    if isinstance(value, range):
        if value and min(value[0], value[-1]) < 0:
            raise SettingsError(f"{subject}: expected steps of at least 0, found {value!r}")
        return value
    return frozenset(whole_number(f"{subject}: a step", step, 0) for step in value)


def require_policy(subject: str, policy: Any, method: str) -> None:
    """Raise SettingsError unless `policy` is an object (not a class) with the method `method`.

    Args:
        subject: names the argument in the message: "StepManager.save_decision_policy".
        policy: what was given.
        method: "should_save" or "should_preserve".
    """
    if isinstance(policy, type):
        raise SettingsError(
            f"{subject}: expected an object with {method}(...), found the class {policy.__name__}; "
            f"write {policy.__name__}(...)"
        )
    if callable(getattr(policy, method, None)):
        return
    found = repr(policy)
    if callable(getattr(policy, "should_save", None)):
        found += ", which is a save policy"
    elif callable(getattr(policy, "should_preserve", None)):
        found += ", which is a preservation policy"
    raise SettingsError(f"{subject}: expected an object with {method}(...), found {found}")


def child_policies(subject: str, value: object, method: str) -> tuple[Any, ...]:
    """`value` as a tuple of at least one policy, each with the method `method`."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        refuse(subject, f"a sequence of policies with {method}(...)", value)
    children = tuple(value)
    if not children:
        raise SettingsError(f"{subject}: expected at least one policy, found none")
    for position, child in enumerate(children):
        require_policy(f"{subject}[{position}]", child, method)
    return children


def steps_text(steps: Collection[int]) -> str:
    """Steps as they appear in a repr: in order, so that equal policies read the same."""
    return repr(steps) if isinstance(steps, range) else repr(sorted(steps))
