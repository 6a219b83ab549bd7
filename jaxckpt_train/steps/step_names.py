"""The names of step directories: `step-0000000100`, and `step-0000000100.g1` for its next generation."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxckpt_train.errors import CheckpointExistsError, SettingsError
from jaxckpt_train.value_checks import index_of

MAX_STEP = 10**15
_DIGITS = 6
MAX_GENERATION = 10**_DIGITS - 1
_NAME = re.compile(rf"step-(?P<step>[0-9]{{10,16}})(\.g(?P<generation>[1-9][0-9]{{0,{_DIGITS - 1}}}))?")


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
    number = index_of(step)
    if number is None:
        raise SettingsError(f"step: expected a whole number of completed updates, found {step!r}")
    if not 0 <= number < MAX_STEP:
        raise SettingsError(f"step: expected 0 to {MAX_STEP - 1}, found {number}")
    return int(number)


def free_step_name(step: int, names: Iterable[str], committed: Iterable[str] = ()) -> str:
    """The name of the next generation of a step, after all those that are among some names.

    Where a stranger's name has the last number that a generation can have, the first one that is free after those that
    are `committed`: a name with a higher number would be no step's, and what is saved under it lost.

    Raises:
        CheckpointExistsError: there is none.
    """
    taken = _generations(step, names)
    next_one = max(taken, default=-1) + 1
    if next_one > MAX_GENERATION:
        first = max(_generations(step, committed), default=-1) + 1
        free = (number for number in range(first, MAX_GENERATION + 1) if number not in taken)
        next_one = next(free, next_one)
    if next_one > MAX_GENERATION:
        raise CheckpointExistsError(
            f"step {step} cannot be saved again: {step_name(step, MAX_GENERATION)} is there, and no generation comes "
            "after it; move it away, or give it another name"
        )
    return step_name(step, next_one)


def _generations(step: int, names: Iterable[str]) -> set[int]:
    found = map(parse_step_name, names)
    return {parsed[1] for parsed in found if parsed is not None and parsed[0] == step}
