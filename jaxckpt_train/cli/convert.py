"""The commands that write a converted checkpoint: `jaxckpt import`, `export` and `average`.

All three apply operations to a tree, print the plan, and then copy the arrays in pieces, so memory stays limited.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from jaxckpt_train._validation import refuse, text
from jaxckpt_train.cli.output import (
    BACKEND,
    Checkpoint,
    Json,
    Run,
    Step,
    absolute,
    bytes_text,
    checked_step,
    print_columns,
    print_json,
    print_text,
    progress,
    reported_errors,
    step_number,
)
from jaxckpt_train.errors import MismatchError, SettingsError, StepNotFoundError
from jaxckpt_train.inspection.copying import refuse_destination
from jaxckpt_train.inspection.diff import leaves_by_name
from jaxckpt_train.inspection.runs import (
    StepStatus,
    import_info,
    inspect_run,
    metadata_of,
    nbytes_of,
    open_at,
    part_bytes,
)
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.paths import describe_keys, idle_pattern, leaf_filter, suggestion
from jaxckpt_train.store.copy import copy_checkpoint
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import PartRecord
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.transaction import (
    MOVE_IT_AWAY,
    refuse_existing_name,
    refuse_temporary_name,
    remove_stale_temporaries,
)
from jaxckpt_train.transforms.apply import Average, Transformed, apply_operations, parse_operation, parse_operations
from jaxckpt_train.transforms.base import Change, Leaves, Operation

MOST_BYTES = 16 << 20
MOST_SHOWN = 40
Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--op",
        "-o",
        help="An operation on the tree, such as 'rename model/** params/**', 'drop head/**', 'cast ** bfloat16', "
        "'stack layers/{}/** layers/**', 'transpose */kernel 1,0'. Several are applied in the given order.",
        show_default=False,
    ),
]
OperationsFile = Annotated[
    str | None,
    typer.Option(
        "--transforms",
        help="A JSON or YAML file with a list of operations.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Print what would change, and write nothing.")]
GB = 10**9
SHARD_BYTES, SEPARATOR = 5 * GB, "."
MOST_NAMED = 5
_NNX = (
    "Orbax restores this state of Flax NNX into nested dicts (nnx.to_pure_dict). To restore it into nnx.state(model), "
    "export it with --op 'rename ** **/value'."
)
ExportOut = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="The folder to write. For safetensors, a name that ends in .safetensors makes a single file.",
        show_default=False,
    ),
]
To = Annotated[str, typer.Option("--to", help="safetensors (in the layout of Hugging Face) or orbax (a step).")]
PartToWrite = Annotated[
    str | None,
    typer.Option(
        "--part", "-p", help="The checkpointable, a tree. Default: 'state', or the only tree.", show_default=False
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="Leaf paths or patterns to write, after all operations. Default: all.",
        show_default=False,
    ),
]
ShardGb = Annotated[
    float | None,
    typer.Option("--shard-gb", help="safetensors: the most GB of tensors in one file.", show_default="5.0"),
]
Separator = Annotated[
    str | None,
    typer.Option("--separator", help="safetensors: the text between the keys of a path.", show_default="."),
]
Item = Annotated[
    str | None,
    typer.Option(
        "--item",
        help="orbax: the name of the item of the tree. Default: the name of the checkpointable.",
        show_default=False,
    ),
]
READ_BUDGET_MIB = 384
"""Enough to decode two chunks of 64 MiB at a time: each is held as stored, decoded, and as an array."""
ImportOut = Annotated[str, typer.Argument(metavar="OUT", help="The checkpoint to write.", show_default=False)]
PartToTake = Annotated[
    str | None,
    typer.Option(
        "--part",
        "-p",
        help="The checkpointable, a tree. Default: all, and operations change 'state', or the only tree.",
        show_default=False,
    ),
]
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
LAST = 5
LEAVES = "params/**"
_log = logging.getLogger("jaxckpt_train")
Last = Annotated[
    int | None, typer.Option("--last", "-l", min=2, help="The number of newest valid steps.", show_default=str(LAST))
]
LeavesToAverage = Annotated[
    str, typer.Option("--leaves", help="Leaf path or pattern to average. Other leaves are taken from the newest step.")
]
PartToAverage = Annotated[
    str | None,
    typer.Option("--part", "-p", help="The checkpointable. Default: 'state', or the only tree.", show_default=False),
]


def chosen_operations(file: str | None, texts: list[str] | None) -> tuple[Operation, ...]:
    """Parse the operations of a file, followed by those of the command line.

    Raises:
        SettingsError: an operation is not valid, or the file does not contain a list of operations.
        StorageError: the file cannot be read.
    """
    found, texts = tuple[Operation, ...](), texts or []
    if file is not None:
        path = absolute(file)
        folder, _, name = path.rpartition("/")
        data = bytes(memoryview(read_whole(BACKEND, folder or "/", name, MOST_BYTES)))
        given = _decoded(path, data)
        found = parse_operations(path, given, len(given) + len(texts) if isinstance(given, list) else None)
    first, in_all = len(found) + 1, len(found) + len(texts)
    return (*found, *(parse_operation(text, number, in_all) for number, text in enumerate(texts, first)))


def _decoded(path: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        not_json = error
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError(f"{path}: expected JSON, found {not_json}. For YAML install PyYAML.") from not_json
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: expected JSON or YAML, found {' '.join(str(error).split())}") from error


def changed(opened: Opened, part: str, operations: tuple[Operation, ...]) -> Transformed:
    """Apply operations to one tree of an opened checkpoint, without reading arrays."""
    return apply_operations(opened.files, opened.committed, part, operations, opened.settings)


def plan_json(transformed: Transformed) -> list[dict[str, Any]]:
    """Return the plan of the operations for JSON."""
    return [
        {"op": name, "changes": [{"from": old, "to": new} for old, new in changes]}
        for name, changes in transformed.plan
    ]


def print_plan(transformed: Transformed) -> None:
    """Print the plan of the operations, with at most `MOST_SHOWN` changes for each."""
    for number, (name, changes) in enumerate(transformed.plan, 1):
        print_text(f"{number}. {name}: {len(changes)} {'change' if len(changes) == 1 else 'changes'}")
        rows = [["  " + old, "->", new] for old, new in changes[:MOST_SHOWN]]
        if rows:
            print_columns(rows[0], rows[1:], [False, False, False])
        if len(changes) > MOST_SHOWN:
            print(f"  ... and {len(changes) - MOST_SHOWN} more")


def export(
    path: Checkpoint,
    out: ExportOut,
    to: To,
    step: Step = None,
    part: PartToWrite = None,
    only: Only = None,
    op: Operations = None,
    transforms: OperationsFile = None,
    shard_gb: ShardGb = None,
    separator: Separator = None,
    item: Item = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the tree of a checkpoint for another tool: as safetensors files, or as a step for Orbax."""
    with reported_errors(as_json):
        form = _form(to, out, shard_gb, separator, item)
        opened = open_at(BACKEND, absolute(path), step_number(step))
        source, name, plan = prepared(opened, part, only, chosen_operations(transforms, op))
        others = [] if part else [each.name for each in opened.committed.manifest.parts if each.name != name]
        document: dict[str, Any] = {"from": opened.path, "to": absolute(out), "format": to, "plan": plan_json(plan)}
        document["skipped"] = opened.skipped
        if not as_json:
            print_plan(plan)
        if dry_run:
            document |= to_be_written(source, [name])
        else:
            refuse_destination(BACKEND, document["to"])
            document |= _write(source, name, document["to"], form, as_json)
        if as_json:
            print_json({**document, "left_out": [*document.get("left_out", ()), *others]})
            return
        print_text(to_be_written_text(document) if dry_run else _written_text(document))
        if document.get("left_out"):
            print_text(f"left out, because safetensors cannot hold them: {', '.join(document['left_out'])}")
        for note in document.get("notes", ()):
            print(note, file=sys.stderr)
        if others:
            print(f"left out, because only {name!r} is written: {', '.join(map(repr, others))}", file=sys.stderr)


class _Form(NamedTuple):
    """The format to write, with its options."""

    to: str
    shard_bytes: int
    separator: str
    item: str | None
    single_file: bool


def _form(to: str, out: str, shard_gb: float | None, separator: str | None, item: str | None) -> _Form:
    if to not in ("safetensors", "orbax"):
        raise SettingsError(f'--to: expected "safetensors" or "orbax", found {to!r}')
    if to != "orbax" and item is not None:
        raise SettingsError(f"--item: expected --to orbax, found --to {to}: it has no effect with another format")
    if to != "safetensors" and (shard_gb is not None or separator is not None):
        raise SettingsError(
            f"--shard-gb and --separator: expected --to safetensors, found --to {to}: they have no effect with another "
            "format"
        )
    single_file = to == "safetensors" and out.endswith(".safetensors")
    if single_file and shard_gb is not None:
        raise SettingsError(f"--shard-gb: expected a folder for several files, found the single file {out!r}")
    shard_bytes = SHARD_BYTES if shard_gb is None else _bytes_of(shard_gb)
    own_separator = SEPARATOR if separator is None else text("--separator", separator)
    return _Form(to, shard_bytes, own_separator, item, single_file)


def _bytes_of(shard_gb: float) -> int:
    shard_bytes = shard_gb * GB
    if not 1 <= shard_bytes < math.inf:  # also refuses nan
        refuse("--shard-gb", "a number of GB above 0", shard_gb)
    return int(shard_bytes)


def _written_text(document: dict[str, Any]) -> str:
    return f"{document['to']}: {bytes_text(document['bytes'])}, {', '.join(document['files'])}"


def to_be_written(source: Opened, parts: list[str]) -> dict[str, int]:
    """Return the numbers of leaves and bytes of some parts of a checkpoint."""
    leaves = sum(name.partition("/")[0] in parts for name in leaves_by_name(source))
    return {"leaves": leaves, "bytes": sum(part_bytes(source, name) for name in parts)}


def to_be_written_text(document: dict[str, Any]) -> str:
    """Return the summary that a dry run prints."""
    leaves, size = document["leaves"], bytes_text(document["bytes"])
    return f"{document['to']}: would have {leaves:,} {'leaf' if leaves == 1 else 'leaves'}, {size}"


def prepared(
    opened: Opened, part: str | None, only: list[str] | None, operations: tuple[Operation, ...]
) -> tuple[Opened, str, Any]:
    """Apply the operations and `--only` to a tree; return the checkpoint, the name of the tree, and the plan."""
    found = opened.part(part)
    name, trees = found.name, opened.trees
    if name not in trees:
        raise MismatchError(
            f"{opened.path}: expected a checkpointable that is a tree, found {name!r}, which is of kind "
            f"{found.kind!r}; the trees are {', '.join(map(repr, trees)) or 'none'}"
        )
    transformed = changed(opened, name, operations)
    source = dataclasses.replace(opened, files=transformed.files, committed=transformed.committed)
    if only:
        chosen = changed(source, name, (_Select(only, opened.path),))
        source = dataclasses.replace(source, files=chosen.files, committed=chosen.committed)
    return source, name, transformed


class _Select(Operation):
    """Keeps only the leaves that match `--only`."""

    name = "only"

    def __init__(self, only: list[str], path: str) -> None:
        self._only, self._path = only, path

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """Drop the leaves that match no pattern."""
        idle = idle_pattern(self._only, leaves)
        if idle is not None:
            raise MismatchError(
                f"{self._path}: --only {idle!r} selects none of the {len(leaves)} leaves after all "
                f"operations{suggestion(idle, leaves)}: {describe_keys(str(idle), leaves)}"
            )
        selected = leaf_filter(self._only)
        for name in [name for name in leaves if not selected(name)]:
            del leaves[name]
        return []


def _texts(custom: object) -> dict[str, str]:
    """Return the entries of the custom metadata that safetensors can hold: text."""
    return {name: text for name, text in custom.items() if isinstance(text, str)} if isinstance(custom, dict) else {}


def _write(source: Opened, name: str, out: str, form: _Form, as_json: bool) -> dict[str, Any]:
    part = source.part(name)
    with progress("writing", sum(map(nbytes_of, part.arrays)), as_json) as advance:
        if form.to == "safetensors":
            return _write_safetensors(source, part, out, form, advance)
        return _write_orbax(source, part, out, form, advance)


def _write_safetensors(
    source: Opened, part: PartRecord, out: str, form: _Form, advance: ReadProgress
) -> dict[str, Any]:
    from jaxckpt_train.formats.safetensors import export_safetensors

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
    notes = [_note_of_keys(found.prng_keys)] if found.prng_keys else []
    document = {"bytes": found.nbytes, "files": list(found.files), "left_out": list(found.left_out)}
    return {**document, "prng_keys": list(found.prng_keys), "notes": notes}


def _note_of_keys(keys: Sequence[str]) -> str:
    count = f"{len(keys):,} PRNG {'key is' if len(keys) == 1 else 'keys are'} written as plain integers"
    more = f" and {len(keys) - MOST_NAMED:,} more" if len(keys) > MOST_NAMED else ""
    return (
        f"{count}, because safetensors has no keys: {', '.join(keys[:MOST_NAMED])}{more}. They cannot be loaded into a "
        "target with keys. Use --op 'drop PATTERN' to leave them out."
    )


def _write_orbax(source: Opened, part: PartRecord, out: str, form: _Form, advance: ReadProgress) -> dict[str, Any]:
    from jaxckpt_train.formats.orbax_write import export_orbax, is_nnx_state

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


def import_(
    path: Checkpoint,
    out: ImportOut,
    step: Step = None,
    part: PartToTake = None,
    only: Only = None,
    op: Operations = None,
    transforms: OperationsFile = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint of Orbax, PyTorch, safetensors or Flax, and transform its tree if asked to.

    Arrays pass through memory in pieces, and the result has digests. If large chunks have to be decoded, the command
    restarts itself with GLIBC_TUNABLES set for huge pages, which halves the time.
    """
    with reported_errors(as_json):
        final = absolute(out)
        opened = open_at(BACKEND, absolute(path), step_number(step))
        source, name, plan = prepared(opened, part, only, chosen_operations(transforms, op))
        document: dict[str, Any] = {"from": opened.path, "kind": opened.kind, "to": final, "plan": plan_json(plan)}
        document["skipped"] = opened.skipped
        if not as_json:
            print_plan(plan)
        if dry_run:
            parts = [each.name for each in source.committed.manifest.parts] if part is None else [name]
            document |= to_be_written(source, parts)
        else:
            make_room(final)
            info = {"created": now_text(), **metadata_of(opened), **import_info(opened)}
            chosen = None if part is None else [name]
            document["bytes"] = write_prepared(source, final, info, chosen, read_budget_mib, as_json)
        if as_json:
            print_json(document)
        else:
            print_text(to_be_written_text(document) if dry_run else f"{final}: {bytes_text(document['bytes'])}")


def write_prepared(
    source: Opened, final: str, info: dict[str, Any], parts: list[str] | None, read_budget_mib: int, as_json: bool
) -> int:
    """Write a checkpoint from the result of `prepared` with a progress line, and return its data size in bytes."""
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
    """Refuse a name that exists or is not allowed, and remove the temporary files of a killed import of this name."""
    refuse_existing_name(final)
    refuse_temporary_name(final)
    refuse_destination(BACKEND, final)
    remove_stale_temporaries(BACKEND, final)


def now_text() -> str:
    """Return the current time in the format of manifests."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _checked_steps(steps: list[str] | None) -> list[str] | None:
    for step in steps or ():
        checked_step(step)
    return steps


Steps = Annotated[
    list[str] | None,
    typer.Option(
        "--step",
        "-s",
        metavar="NUMBER",
        callback=_checked_steps,
        help="The steps to average, instead of the newest.",
        show_default=False,
    ),
]


def average(
    run: Run,
    out: ImportOut,
    last: Last = None,
    step: Steps = None,
    leaves: LeavesToAverage = LEAVES,
    part: PartToAverage = None,
    only: Only = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Write a checkpoint whose parameters are the mean of those of the last steps of a run.

    Floating-point leaves are summed in double precision and rounded once. Everything else is taken from the newest of
    the steps.
    """
    with reported_errors(as_json):
        path, final = absolute(run), absolute(out)
        looks, skipped = _steps(path, last, step)
        paths = [f"{path}/{look.name}" for look in looks]
        opened = open_at(BACKEND, paths[-1])
        operation = Average(leaves, paths[:-1], opened.part(part).name)
        source, name, plan = prepared(opened, part, only, (operation,))
        steps = [look.step for look in looks]
        summary: dict[str, Any] = {
            "run": path,
            "steps": steps,
            "to": final,
            "plan": plan_json(plan),
            "skipped": skipped,
        }
        if not as_json:
            print_plan(plan)
        parts = [each.name for each in source.committed.manifest.parts] if part is None else [name]
        if dry_run:
            summary |= to_be_written(source, parts)
        else:
            make_room(final)
            about = {key: value for key, value in metadata_of(opened).items() if key not in ("metrics", "temporary")}
            info = {**about, "created": now_text(), **import_info(opened), "averaged_steps": steps}
            summary["bytes"] = write_prepared(source, final, info, parts, read_budget_mib, as_json)
        if as_json:
            print_json(summary)
        else:
            written = f"{final}: {bytes_text(summary['bytes'])}, the mean of steps {', '.join(map(str, steps))}"
            print_text(to_be_written_text(summary) if dry_run else written)


def _steps(path: str, last: int | None, chosen: list[str] | None) -> tuple[list[StepStatus], list[str]]:
    """Return the steps to average, the newest last, and the names of the damaged steps that are skipped."""
    looks = inspect_run(BACKEND, path)
    valid = [look for look in looks if look.entry is not None and look.is_current and look.problem is None]
    if chosen:
        if last is not None:
            raise SettingsError("--last and --step: expected one of them, found both")
        return _named(path, valid, chosen), []
    count = LAST if last is None else last
    if len(valid) < max(2, last or 0):
        raise StepNotFoundError(f"{path}: expected {max(2, last or 0)} valid steps to average, found {len(valid)}")
    taken = valid[-count:]
    bad = [each for each in looks if each.problem is not None and each.step > taken[0].step]
    for look in bad:
        if look.refusal is not None:
            raise look.refusal  # the step is unreadable, but it may be valid
        _log.warning("%s/%s is skipped: %s", path, look.name, look.problem)
    return taken, [look.name for look in bad]


def _named(path: str, valid: list[StepStatus], chosen: list[str]) -> list[StepStatus]:
    wanted = {step_number(step) for step in chosen}
    found = [look for look in valid if look.step in wanted]
    missing = wanted.difference(look.step for look in found)
    if missing:
        there = ", ".join(str(look.step) for look in valid[-LAST:]) or "none"
        raise StepNotFoundError(
            f"{path}: has no valid step {', '.join(map(str, missing))}; the last valid steps are {there}"
        )
    if len(found) < 2:
        raise SettingsError(f"--step: expected at least two steps, found {', '.join(chosen)}")
    return found
