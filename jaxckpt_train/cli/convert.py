"""The commands that write a converted checkpoint: `jaxckpt import` and `export`.

Both apply operations to a tree, print the plan, and then copy the arrays in pieces, so memory stays limited.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from jaxckpt_train._validation import refuse, text
from jaxckpt_train.cli.output import (
    BACKEND,
    Checkpoint,
    Json,
    Step,
    absolute,
    argument,
    option,
    print_columns,
    print_json,
    print_text,
    progress,
)
from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.inspection.copying import refuse_destination
from jaxckpt_train.inspection.diff import leaves_by_name
from jaxckpt_train.inspection.runs import (
    import_info,
    metadata_of,
    nbytes_of,
    open_at,
    part_bytes,
)
from jaxckpt_train.inspection.units import bytes_text, counted
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.leaves import leaf_filter, refuse_idle_pattern
from jaxckpt_train.store.copy import copy_checkpoint
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import PartRecord
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.removal import refuse_reserved_name, remove_stale_temporaries
from jaxckpt_train.store.transaction import refuse_existing_name
from jaxckpt_train.transforms.apply import apply_operations, parse_operation, parse_operations
from jaxckpt_train.transforms.operations import Change, Leaves, Operation

MOST_BYTES = 16 << 20
MOST_SHOWN = 40
GB = 10**9
SHARD_GB, SEPARATOR = 5, "."
READ_BUDGET_MIB = 384  # decodes two chunks of 64 MiB at a time: each is held as stored, decoded, and as an array
_NNX = (
    "Orbax restores this state of Flax NNX into nested dicts (nnx.to_pure_dict). To restore it into nnx.state(model), "
    "export it with --op 'rename ** **/value'."
)
Operations = Annotated[
    list[str] | None,
    option(
        "An operation on the tree, such as 'rename model/** params/**', 'drop head/**', 'cast ** bfloat16', "
        "'stack layers/{}/** layers/**', 'transpose */kernel 1,0'. Several are applied in the given order.",
        "--op",
        "-o",
    ),
]
File = Annotated[str | None, option("A JSON or YAML file with a list of operations.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Print what would change, and write nothing.")]
Only = Annotated[list[str] | None, option("Leaf paths or patterns to write, after all operations. Default: all.")]
Part = Annotated[str | None, option("The checkpointable, a tree. Default: 'state', or the only tree.", "--part", "-p")]
Out = Annotated[str, argument("OUT", "The checkpoint to write.")]
Budget = Annotated[
    int,
    typer.Option(
        metavar="MIB",
        min=1,
        max=1 << 20,
        help="The memory limit for reading, except for larger chunks and for operations that change values or shapes. "
        "Writing takes 96 MiB more.",
    ),
]


def _chosen_operations(file: str | None, texts: list[str] | None) -> tuple[Operation, ...]:
    found, texts = tuple[Operation, ...](), texts or []
    if file is not None:
        path = absolute(file)
        folder, _, name = path.rpartition("/")
        given = _decoded(path, bytes(memoryview(read_whole(BACKEND, folder or "/", name, MOST_BYTES))))
        found = parse_operations(path, given, len(given) + len(texts) if isinstance(given, list) else None)
    first, in_all = len(found) + 1, len(found) + len(texts)
    return (*found, *(parse_operation(text, number, in_all) for number, text in enumerate(texts, first)))


def _decoded(path: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        pass
    try:
        return msgspec.yaml.decode(data)
    except (ImportError, msgspec.DecodeError) as error:
        raise SettingsError(f"{path}: expected JSON or YAML, found neither: {' '.join(str(error).split())}") from error


def _prepared(
    opened: Opened, part: str | None, only: list[str] | None, operations: tuple[Operation, ...], prints: bool
) -> tuple[Opened, str, list[dict[str, Any]]]:
    """Apply the operations and `--only` to a tree, and print the plan.

    Returns the checkpoint, the name of the tree, and the plan for JSON. No array is read.
    """
    found = opened.part(part)
    name, trees = found.name, opened.trees
    if name not in trees:
        raise MismatchError(
            f"{opened.path}: expected a checkpointable that is a tree, found {name!r}, which is of kind "
            f"{found.kind!r}; the trees are {', '.join(map(repr, trees)) or 'none'}"
        )
    selection = (_Select(only, opened.path),) if only else ()
    transformed = apply_operations(opened.files, opened.committed, name, (*operations, *selection), opened.settings)
    made = transformed.plan[: len(operations)]
    if prints:
        _print_plan(made)
    plan = [
        {"op": operation, "changes": [{"from": old, "to": new} for old, new in changes]} for operation, changes in made
    ]
    return dataclasses.replace(opened, files=transformed.files, committed=transformed.committed), name, plan


def _print_plan(plan: Sequence[tuple[str, Sequence[Change]]]) -> None:
    for number, (name, changes) in enumerate(plan, 1):
        print_text(f"{number}. {name}: {counted(len(changes), 'change')}")
        rows = [["  " + old, "->", new] for old, new in changes[:MOST_SHOWN]]
        if rows:
            print_columns(rows[0], rows[1:], [False, False, False])
        if len(changes) > MOST_SHOWN:
            print(f"  ... and {len(changes) - MOST_SHOWN} more")


class _Select(Operation):
    """Keeps only the leaves that match `--only`."""

    name = "only"

    def __init__(self, only: list[str], path: str) -> None:
        self._only, self._path = only, path

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        refuse_idle_pattern(self._path, self._only, leaves)
        selected = leaf_filter(self._only)
        for name in [name for name in leaves if not selected(name)]:
            del leaves[name]
        return []


def export(
    path: Checkpoint,
    out: Annotated[str, argument("OUT", "The folder to write, or a single file if it ends in .safetensors.")],
    to: Annotated[str, typer.Option(help="safetensors (in the layout of Hugging Face) or orbax (a step).")],
    step: Step = None,
    part: Part = None,
    only: Only = None,
    op: Operations = None,
    transforms: File = None,
    shard_gb: Annotated[float | None, option("safetensors: the most GB of tensors in one file. Default: 5.")] = None,
    separator: Annotated[str | None, option("safetensors: the text between the keys of a path. Default: .")] = None,
    item: Annotated[str | None, option("orbax: the name of the item. Default: that of the checkpointable.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the tree of a checkpoint for another tool: as safetensors files, or as a step for Orbax."""
    _check_options(to, out, shard_gb, separator, item)
    opened, final = open_at(BACKEND, absolute(path), step), absolute(out)
    source, name, plan = _prepared(opened, part, only, _chosen_operations(transforms, op), not as_json)
    others = [] if part else [each.name for each in opened.committed.manifest.parts if each.name != name]
    document: dict[str, Any] = {"from": opened.path, "to": final, "format": to, "plan": plan, "skipped": opened.skipped}
    if dry_run:
        document |= _to_be_written(source, [name])
    else:
        refuse_destination(BACKEND, final)
        tree = source.part(name)
        with progress("writing", sum(map(nbytes_of, tree.arrays)), as_json) as advance:
            if to == "orbax":
                document |= _write_orbax(source, tree, final, item, advance)
            else:
                is_single = out.endswith(".safetensors")
                document |= _write_safetensors(source, tree, final, is_single, shard_gb, separator, advance)
    if as_json:
        print_json({**document, "left_out": [*document.get("left_out", ()), *others]})
        return
    if dry_run:
        _print_dry_run(document)
    else:
        print_text(f"{final}: {bytes_text(document['bytes'])}, {', '.join(document['files'])}")
    if document.get("left_out"):
        print_text(f"left out, because safetensors cannot hold them: {', '.join(document['left_out'])}")
    for note in document.get("notes", ()):
        print(note, file=sys.stderr)
    if others:
        print(f"left out, because only {name!r} is written: {', '.join(map(repr, others))}", file=sys.stderr)


def _to_be_written(source: Opened, parts: list[str]) -> dict[str, int]:
    leaves = sum(name.partition("/")[0] in parts for name in leaves_by_name(source))
    return {"leaves": leaves, "bytes": sum(part_bytes(source, name) for name in parts)}


def _print_dry_run(document: dict[str, Any]) -> None:
    leaves, size = counted(document["leaves"], "leaf", "leaves"), bytes_text(document["bytes"])
    print_text(f"{document['to']}: would have {leaves}, {size}")


def _check_options(to: str, out: str, shard_gb: float | None, separator: str | None, item: str | None) -> None:
    if to not in ("safetensors", "orbax"):
        raise SettingsError(f'--to: expected "safetensors" or "orbax", found {to!r}')
    given = (
        ("--shard-gb", shard_gb, "safetensors"),
        ("--separator", separator, "safetensors"),
        ("--item", item, "orbax"),
    )
    for name, value, form in given:
        if value is not None and to != form:
            raise SettingsError(f"{name}: expected --to {form}, found --to {to}")
    if shard_gb is not None and out.endswith(".safetensors"):
        raise SettingsError(f"--shard-gb: expected a folder for several files, found the single file {out!r}")
    if shard_gb is not None and not 1 <= shard_gb * GB < math.inf:  # also refuses nan
        refuse("--shard-gb", "a number of GB above 0", shard_gb)
    if separator is not None:
        text("--separator", separator)


def _write_safetensors(
    source: Opened,
    part: PartRecord,
    out: str,
    is_single: bool,
    shard_gb: float | None,
    separator: str | None,
    advance: ReadProgress,
) -> dict[str, Any]:
    from jaxckpt_train.formats.safetensors import export_safetensors

    custom = metadata_of(source).get("custom_metadata")
    texts = {name: text for name, text in custom.items() if isinstance(text, str)} if isinstance(custom, dict) else {}
    found = export_safetensors(
        source.files,
        source.committed,
        part,
        BACKEND,
        out,
        source.settings,
        separator=separator or SEPARATOR,
        shard_bytes=int((shard_gb or SHARD_GB) * GB),
        single_file=is_single,
        metadata=texts | {"format": "pt"},
        progress=advance,
    )
    keys, notes = list(found.prng_keys), []
    if keys:
        notes = [
            f"PRNG keys are written as plain integers, because safetensors has no keys: {', '.join(keys)}. They cannot "
            "be loaded into a target with keys. Use --op 'drop PATTERN' to leave them out."
        ]
    document = {"bytes": found.nbytes, "files": list(found.files), "left_out": list(found.left_out)}
    return {**document, "prng_keys": keys, "notes": notes}


def _write_orbax(source: Opened, part: PartRecord, out: str, item: str | None, advance: ReadProgress) -> dict[str, Any]:
    from jaxckpt_train.formats.orbax_write import export_orbax, is_nnx_state

    name = export_orbax(
        source.files, source.committed, part, BACKEND, out, source.settings, item=item, progress=advance
    )
    notes = [_NNX] if is_nnx_state(part, source.path) else []
    return {"bytes": sum(map(nbytes_of, part.arrays)), "files": [name], "left_out": [], "notes": notes}


def import_(
    path: Checkpoint,
    out: Out,
    step: Step = None,
    part: Annotated[
        str | None,
        option("The checkpointable. Default: all; operations change 'state' or the only tree.", "--part", "-p"),
    ] = None,
    only: Only = None,
    op: Operations = None,
    transforms: File = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint of Orbax, PyTorch, safetensors or Flax, and transform its tree if asked to.

    Arrays pass through memory in pieces, and the result has digests.
    """
    opened = open_at(BACKEND, absolute(path), step)
    source, name, plan = _prepared(opened, part, only, _chosen_operations(transforms, op), not as_json)
    parts, final = None if part is None else [name], absolute(out)
    document: dict[str, Any] = {"from": opened.path, "kind": opened.kind, "to": final, "plan": plan}
    document["skipped"] = opened.skipped
    if dry_run:
        document |= _to_be_written(source, parts or [each.name for each in source.committed.manifest.parts])
    else:
        refuse_existing_name(BACKEND, final)
        refuse_reserved_name(final)
        refuse_destination(BACKEND, final)
        remove_stale_temporaries(BACKEND, final)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with progress("writing", None, as_json) as advance:
            committed = copy_checkpoint(
                source.files,
                source.committed,
                BACKEND,
                final,
                dataclasses.replace(source.settings, read_budget_bytes=read_budget_mib << 20),
                info={"created": created, **metadata_of(opened), **import_info(opened)},
                parts=parts,
                decoding=source.decoding,
                progress=advance,
            )
        document["bytes"] = committed.data_bytes
    if as_json:
        print_json(document)
    elif dry_run:
        _print_dry_run(document)
    else:
        print_text(f"{final}: {bytes_text(document['bytes'])}")
