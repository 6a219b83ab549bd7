"""Arguments and options that several commands have."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.value_checks import absolute_path, shown

BACKEND = LocalBackend()


def step_number(step: str | None) -> float | None:
    """The number of a step as a user gives it, of Flax also one with a fraction; None: none is given, or it is none."""
    if step is None:
        return None
    try:
        return int(step)  # not by way of a float, which would round a large one
    except ValueError:
        pass
    try:
        number = float(step)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def checked_step(step: str | None) -> str | None:
    """What is given as a step, or a wrong call if that is no number."""
    if step is not None and step_number(step) is None:
        raise typer.BadParameter(f"expected a number, such as 100 or 9.5, found {shown(step)}")
    return step


def step_option(*names: str, told: str) -> Any:
    """An option by which a step is chosen."""
    return typer.Option(*names, metavar="NUMBER", callback=checked_step, help=told, show_default=False)


Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint, a step, or a run: its newest whole step; "
        "or what Orbax, PyTorch, safetensors or Flax have written.",
        show_default=False,
    ),
]
Step = Annotated[str | None, step_option("--step", "-s", told="Of a run, also of Orbax or Flax: which step.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATTERN]...",
        help="Leaf paths such as 'params/*/kernel' or 'opt_state/**'; none: all.",
        show_default=False,
    ),
]
Part = Annotated[
    str | None, typer.Option("--part", "-p", help="Which checkpointable; else all of them.", show_default=False)
]


def absolute(path: str) -> str:
    """The absolute path that a user means.

    Raises:
        SettingsError: it is none.
    """
    return absolute_path("path", path)
