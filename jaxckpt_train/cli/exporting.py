"""`jaxckpt export`: writes a checkpoint for another tool."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Step, absolute, step_number
from jaxckpt_train.cli.operations import (
    DryRun,
    Operations,
    OperationsFile,
    changed,
    chosen_operations,
    plan_json,
    print_plan,
)
from jaxckpt_train.cli.output import bytes_text, print_json, print_text, progress, told_errors
from jaxckpt_train.cli.show import nbytes_of, part_bytes
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.looking.leaf_diff import leaves_by_name
from jaxckpt_train.looking.opening import metadata_of, open_at
from jaxckpt_train.moving.destination import refuse_place
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.manifest import PartRecord
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.surgery.leaves import Leaves
from jaxckpt_train.surgery.operation import Change, Operation
from jaxckpt_train.tree.patterns import idle_pattern, keys_there, leaf_filter, suggestion
from jaxckpt_train.value_checks import refuse, text

GB = 10**9
SHARD_BYTES, SEPARATOR = 5 * GB, "."
MOST_NAMED = 5
_NNX = (
    "Orbax restores this state of Flax NNX onto nested dicts (nnx.to_pure_dict); onto nnx.state(model) with "
    "--op 'rename ** **/value'"
)
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The folder to write; safetensors: one file, if its name ends in .safetensors.",
        show_default=False,
    ),
]
To = Annotated[str, typer.Option("--to", help="safetensors (as Hugging Face lays models out), or orbax (a step).")]
PartToWrite = Annotated[
    str | None,
    typer.Option(
        "--part", "-p", help="Which checkpointable, a tree; else 'state', or the only tree.", show_default=False
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="Leaf paths or patterns to write, as the operations leave the tree; else all.",
        show_default=False,
    ),
]
ShardGb = Annotated[
    float | None,
    typer.Option("--shard-gb", help="safetensors: a file has at most so many GB of tensors.", show_default="5.0"),
]
Separator = Annotated[
    str | None,
    typer.Option("--separator", help="safetensors: between the keys of a path in a name.", show_default="."),
]
Item = Annotated[
    str | None, typer.Option("--item", help="orbax: another name for the item of the tree.", show_default=False)
]


def export(
    path: Checkpoint,
    out: Out,
    to: To,
    step: Step = None,
    part: PartToWrite = None,
    only: Only = None,
    op: Operations = None,
    surgery: OperationsFile = None,
    shard_gb: ShardGb = None,
    separator: Separator = None,
    item: Item = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the tree of a checkpoint for another tool: safetensors files, or a step that Orbax restores."""
    with told_errors(as_json):
        form = _form(to, out, shard_gb, separator, item)
        opened = open_at(BACKEND, absolute(path), step_number(step))
        source, name, plan = prepared(opened, part, only, chosen_operations(surgery, op))
        others = [] if part else [each.name for each in opened.committed.manifest.parts if each.name != name]
        told: dict[str, Any] = {"from": opened.path, "to": absolute(out), "format": to, "plan": plan_json(plan)}
        told["skipped"] = opened.skipped
        if not as_json:
            print_plan(plan)
        if dry_run:
            told |= to_be_written(source, [name])
        else:
            refuse_place(BACKEND, told["to"])
            told |= _write(source, name, told["to"], form, as_json)
        if as_json:
            print_json({**told, "left_out": [*told.get("left_out", ()), *others]})
            return
        print_text(to_be_written_text(told) if dry_run else _written_text(told))
        if told.get("left_out"):
            print_text(f"left out, as safetensors has nothing for them: {', '.join(told['left_out'])}")
        for note in told.get("notes", ()):
            print(note, file=sys.stderr)
        if others:
            print(f"left out, as only {name!r} is written: {', '.join(map(repr, others))}", file=sys.stderr)


class _Form(NamedTuple):
    """How a checkpoint is written: for which tool, and what that one has to be told."""

    to: str
    shard_bytes: int
    separator: str
    item: str | None
    single_file: bool


def _form(to: str, out: str, shard_gb: float | None, separator: str | None, item: str | None) -> _Form:
    if to not in ("safetensors", "orbax"):
        raise SettingsError(f'--to: expected "safetensors" or "orbax", found {to!r}')
    if to != "orbax" and item is not None:
        raise SettingsError("--item: expected --to orbax with it, which it is for")
    if to != "safetensors" and (shard_gb is not None or separator is not None):
        raise SettingsError("--shard-gb and --separator: expected --to safetensors with them, which they are for")
    single_file = to == "safetensors" and out.endswith(".safetensors")
    if single_file and shard_gb is not None:
        raise SettingsError(f"--shard-gb: expected a folder to write several files into, found the one file {out!r}")
    shard_bytes = SHARD_BYTES if shard_gb is None else _bytes_of(shard_gb)
    own_separator = SEPARATOR if separator is None else text("--separator", separator)
    return _Form(to, shard_bytes, own_separator, item, single_file)


def _bytes_of(shard_gb: float) -> int:
    shard_bytes = shard_gb * GB
    if not 1 <= shard_bytes < math.inf:  # nan neither
        refuse("--shard-gb", "a number of GB above 0", shard_gb)
    return int(shard_bytes)


def _written_text(told: dict[str, Any]) -> str:
    return f"{told['to']}: {bytes_text(told['bytes'])}, {', '.join(told['files'])}"


def to_be_written(source: Opened, parts: list[str]) -> dict[str, int]:
    """How many leaves some parts of a checkpoint have, and how many bytes."""
    leaves = sum(name.partition("/")[0] in parts for name in leaves_by_name(source))
    return {"leaves": leaves, "bytes": sum(part_bytes(source, name) for name in parts)}


def to_be_written_text(told: dict[str, Any]) -> str:
    """What a dry run says of that."""
    leaves = told["leaves"]
    return f"{told['to']}: would have {leaves:,} {'leaf' if leaves == 1 else 'leaves'}, {bytes_text(told['bytes'])}"


def prepared(
    opened: Opened, part: str | None, only: list[str] | None, operations: tuple[Operation, ...]
) -> tuple[Opened, str, Any]:
    """The checkpoint with its tree changed, and without what was not chosen; the name of that; and the plan."""
    found = opened.part(part)
    name, trees = found.name, opened.trees
    if name not in trees:
        raise MismatchError(
            f"{opened.path}: expected a checkpointable that is a tree, found {name!r}, which is of kind "
            f"{found.kind!r}; the trees are {', '.join(map(repr, trees)) or 'none'}"
        )
    operated = changed(opened, name, operations)
    source = dataclasses.replace(opened, files=operated.files, committed=operated.committed)
    if only:
        chosen = changed(source, name, (_Keep(only, opened.path),))
        source = dataclasses.replace(source, files=chosen.files, committed=chosen.committed)
    return source, name, operated


class _Keep(Operation):
    """Leave out what was not chosen."""

    name = "only"

    def __init__(self, only: list[str], path: str) -> None:
        self._only, self._path = only, path

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """Drop the others."""
        idle = idle_pattern(self._only, leaves)
        if idle is not None:
            raise MismatchError(
                f"{self._path}: --only {idle!r} selects none of the {len(leaves)} leaves that are there after all "
                f"operations{suggestion(idle, leaves)}: {keys_there(str(idle), leaves)}"
            )
        selected = leaf_filter(self._only)
        for name in [name for name in leaves if not selected(name)]:
            del leaves[name]
        return []


def _texts(custom: object) -> dict[str, str]:
    """Of custom metadata what a safetensors file can hold."""
    return {name: text for name, text in custom.items() if isinstance(text, str)} if isinstance(custom, dict) else {}


def _write(source: Opened, name: str, out: str, form: _Form, as_json: bool) -> dict[str, Any]:
    part = source.part(name)
    with progress("writing", sum(map(nbytes_of, part.arrays)), as_json) as advance:
        if form.to == "safetensors":
            return _write_safetensors(source, part, out, form, advance)
        return _write_orbax(source, part, out, form, advance)


def _write_safetensors(source: Opened, part: PartRecord, out: str, form: _Form, advance: Progress) -> dict[str, Any]:
    from jaxckpt_train.formats.safetensors_export import export_safetensors

    found = export_safetensors(
        source.files,
        source.committed,
        part,
        BACKEND,
        out,
        source.settings,
        separator=form.separator,
        shard_bytes=form.shard_bytes,
        single_file=form.single_file,
        metadata=_texts(metadata_of(source).get("custom_metadata")) | {"format": "pt"},
        progress=advance,
    )
    notes = [_told_of_keys(found.prng_keys)] if found.prng_keys else []
    told = {"bytes": found.nbytes, "files": list(found.files), "left_out": list(found.left_out)}
    return {**told, "prng_keys": list(found.prng_keys), "notes": notes}


def _told_of_keys(keys: Sequence[str]) -> str:
    count = f"{len(keys):,} PRNG {'key is' if len(keys) == 1 else 'keys are'} written as bare integers"
    more = f" and {len(keys) - MOST_NAMED:,} more" if len(keys) > MOST_NAMED else ""
    return (
        f"{count}, as safetensors has none: {', '.join(keys[:MOST_NAMED])}{more}; no target that has keys there takes "
        "them: leave them out by --op 'drop PATTERN'"
    )


def _write_orbax(source: Opened, part: PartRecord, out: str, form: _Form, advance: Progress) -> dict[str, Any]:
    from jaxckpt_train.formats.orbax_export import export_orbax, is_nnx_state

    names = export_orbax(
        source.files,
        source.committed,
        BACKEND,
        out,
        source.settings,
        parts=[part.name],
        items=None if form.item is None else {part.name: form.item},
        progress=advance,
    )
    notes = [_NNX] if is_nnx_state(part, source.path) else []
    return {"bytes": sum(map(nbytes_of, part.arrays)), "files": list(names), "left_out": [], "notes": notes}
