"""The names of step directories: `step-0000000100`, and `step-0000000100.g1` for its next generation."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxckpt_train.errors import SettingsError

MAX_STEP = 10**15
_NAME = re.compile(r"step-(?P<step>[0-9]{10,16})(\.g(?P<generation>[1-9][0-9]{0,5}))?")


def step_name(step: int, generation: int = 0) -> str:
    """The directory name of a generation of a step."""
    return f"step-{step:010d}" + (f".g{generation}" if generation else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Step and generation of a directory name; None if it is no step directory's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match["step"]), int(match["generation"] or 0)
    return (step, generation) if step_name(step, generation) == name else None


def check_step(step: object) -> int:
    """The step as an int.

    Raises:
        SettingsError: not a whole number, negative or absurdly large.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise SettingsError(f"step: expected a whole number of completed updates, found {step!r}")
    number = step.__index__()
    if not 0 <= number < MAX_STEP:
        raise SettingsError(f"step: expected 0 to {MAX_STEP - 1}, found {number}")
    return int(number)


def free_step_name(step: int, names: Iterable[str]) -> str:
    """The name of the next generation of a step, after all those that are among some names."""
    taken = [parsed[1] for name in names if (parsed := parse_step_name(name)) is not None and parsed[0] == step]
    return step_name(step, max(taken, default=-1) + 1)
