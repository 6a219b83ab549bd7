"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxckpt_train.store.local import LocalBackend
from jaxckpt_train.value_checks import absolute_path

BACKEND = LocalBackend()

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
Step = Annotated[
    int | None, typer.Option("--step", "-s", help="Of a run, also of Orbax or Flax: which step.", show_default=False)
]
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
