"""`jaxckpt cp`: a verified copy of a checkpoint, or of a step of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, Step, absolute, step_number
from jaxckpt_train.cli.output import bytes_text, print_json, print_text, progress, told_errors
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.moving.checked_copy import copy_checked
from jaxckpt_train.moving.destination import destination
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.transaction import Committed

Source = Annotated[
    str,
    typer.Argument(metavar="SRC", help="A checkpoint, a step, or a run: its newest whole step.", show_default=False),
]
Destination = Annotated[
    str,
    typer.Argument(
        metavar="DST",
        help="Its new path; a run, or a directory with a / at the end: it keeps its name in there.",
        show_default=False,
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Read all bytes of the copy again before it gets its name.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that is there.")]


def cp(
    src: Source,
    dst: Destination,
    step: Step = None,
    check: Check = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint, or one step of a run, and verify it.

    Every byte is compared with its digest as it is read. What the checkpoint says of itself goes along: step, metrics,
    custom metadata, shardings. Of a damaged one nothing is copied: that ends with 1.
    """
    with told_errors(as_json):
        source = open_at(BACKEND, absolute(src), step_number(step))
        final = destination(BACKEND, dst, source)
        done = copied(source, final, overwrite, check, as_json)
        if as_json:
            told = {"source": source.path, "path": final, "bytes": done.data_bytes, "read_again": check}
            print_json({**told, "skipped": source.skipped})
        else:
            print_text(f"{source.path} -> {final}: {bytes_text(done.data_bytes)} copied")


def copied(source: Opened, final: str, overwrite: bool, check: bool, as_json: bool) -> Committed:
    """Copy it with a line on the terminal meanwhile; raises as `copy_checked`."""
    with progress("copying", source.committed.data_bytes * (1 + check), as_json) as advance:
        return copy_checked(BACKEND, source, final, replace=overwrite, every_byte=check, progress=advance)
