"""`jaxckpt import`: makes a checkpoint of ours of what another tool has written, or of another one of ours."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Annotated, Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Step, absolute, step_number
from jaxckpt_train.cli.exporting import Only, prepared, to_be_written, to_be_written_text
from jaxckpt_train.cli.operations import DryRun, Operations, OperationsFile, chosen_operations, plan_json, print_plan
from jaxckpt_train.cli.output import bytes_text, print_json, print_text, progress, told_errors
from jaxckpt_train.looking.opening import metadata_of, open_at, told_of_import
from jaxckpt_train.moving.destination import refuse_place
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.appearing import MOVE_IT_AWAY, refuse_existing_name
from jaxckpt_train.store.copying import copy_checkpoint
from jaxckpt_train.store.final_name import refuse_left_over_name, remove_left_overs

READ_BUDGET_MIB = 384
"""Two chunks of 64 MiB can be decoded in it at a time: each is there as it is stored, decoded, and as an array."""
Out = Annotated[str, typer.Argument(metavar="OUT", help="The checkpoint to write.", show_default=False)]
PartToTake = Annotated[
    str | None,
    typer.Option(
        "--part",
        "-p",
        help="Which checkpointable, a tree; else all, and operations change 'state', or the only tree.",
        show_default=False,
    ),
]
Budget = Annotated[
    int,
    typer.Option(
        metavar="MIB",
        min=1,
        max=1 << 20,
        help="How much memory reading may take, but for two larger chunks, and for operations that change values or "
        "shapes; writing takes 96 MiB more.",
    ),
]


def import_(
    path: Checkpoint,
    out: Out,
    step: Step = None,
    part: PartToTake = None,
    only: Only = None,
    op: Operations = None,
    surgery: OperationsFile = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Make a checkpoint of what Orbax, PyTorch, safetensors or Flax have written; operations may change it.

    Arrays pass through memory one after the other; what is written has digests from then on. Where large chunks are
    to be decoded, memory in huge pages halves the time: the command begins itself again with GLIBC_TUNABLES set so.
    """
    with told_errors(as_json):
        final = absolute(out)
        opened = open_at(BACKEND, absolute(path), step_number(step))
        source, name, plan = prepared(opened, part, only, chosen_operations(surgery, op))
        told: dict[str, Any] = {"from": opened.path, "kind": opened.kind, "to": final, "plan": plan_json(plan)}
        told["skipped"] = opened.skipped
        if not as_json:
            print_plan(plan)
        if dry_run:
            parts = [each.name for each in source.committed.manifest.parts] if part is None else [name]
            told |= to_be_written(source, parts)
        else:
            make_room(final)
            info = {"created": now_text(), **metadata_of(opened), **told_of_import(opened)}
            chosen = None if part is None else [name]
            told["bytes"] = write_prepared(source, final, info, chosen, read_budget_mib, as_json)
        if as_json:
            print_json(told)
        else:
            print_text(to_be_written_text(told) if dry_run else f"{final}: {bytes_text(told['bytes'])}")


def write_prepared(
    source: Opened, final: str, info: dict[str, Any], parts: list[str] | None, read_budget_mib: int, as_json: bool
) -> int:
    """Write what `prepared` gave as a checkpoint of this package, with a progress line; the bytes of its data."""
    with progress("writing", None, as_json) as advance:
        committed = copy_checkpoint(
            source.files,
            source.committed,
            BACKEND,
            final,
            dataclasses.replace(source.settings, read_budget_bytes=read_budget_mib << 20),
            info=info,
            if_taken=MOVE_IT_AWAY,
            parts=parts,
            decoding=source.decoding,
            progress=advance,
        )
    return committed.data_bytes


def make_room(final: str) -> None:
    """Refuse a name that is taken or must not be; remove what an import that was killed has left of this one."""
    refuse_existing_name(final)
    refuse_left_over_name(final)
    refuse_place(BACKEND, final)
    remove_left_overs(BACKEND, final)


def now_text() -> str:
    """This moment, as manifests have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
