"""The commands that write a converted checkpoint: `jaxckpt import`, `export` and `average`.

All three apply operations to a tree, print the plan, and then copy the arrays in pieces, so memory stays limited.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import sys
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
    argument,
    option,
    print_columns,
    print_json,
    print_text,
    progress,
    step_option,
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
from jaxckpt_train.inspection.units import bytes_text, counted
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.leaves import describe_keys, idle_pattern, leaf_filter, suggestion
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
MOST_NAMED = 5
GB = 10**9
SHARD_BYTES, SEPARATOR = 5 * GB, "."
READ_BUDGET_MIB = 384  # decodes two chunks of 64 MiB at a time: each is held as stored, decoded, and as an array
LAST = 5
_NNX = (
    "Orbax restores this state of Flax NNX into nested dicts (nnx.to_pure_dict). To restore it into nnx.state(model), "
    "export it with --op 'rename ** **/value'."
)
_log = logging.getLogger("jaxckpt_train")
Operations = Annotated[
    list[str] | None,
    option(
        "--op",
        "-o",
        help_text="An operation on the tree, such as 'rename model/** params/**', 'drop head/**', 'cast ** bfloat16', "
        "'stack layers/{}/** layers/**', 'transpose */kernel 1,0'. Several are applied in the given order.",
    ),
]
File = Annotated[str | None, option("--transforms", help_text="A JSON or YAML file with a list of operations.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Print what would change, and write nothing.")]
Only = Annotated[
    list[str] | None, option("--only", help_text="Leaf paths or patterns to write, after all operations. Default: all.")
]
Part = Annotated[
    str | None, option("--part", "-p", help_text="The checkpointable, a tree. Default: 'state', or the only tree.")
]
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
    """Parse the operations of a file, followed by those of the command line."""
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
    transformed = apply_operations(opened.files, opened.committed, name, operations, opened.settings)
    if prints:
        _print_plan(transformed)
    plan = [
        {"op": operation, "changes": [{"from": old, "to": new} for old, new in changes]}
        for operation, changes in transformed.plan
    ]
    if only:
        select = _Select(only, opened.path)
        transformed = apply_operations(transformed.files, transformed.committed, name, (select,), opened.settings)
    return dataclasses.replace(opened, files=transformed.files, committed=transformed.committed), name, plan


def _print_plan(transformed: Transformed) -> None:
    for number, (name, changes) in enumerate(transformed.plan, 1):
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


def export(
    path: Checkpoint,
    out: Annotated[str, argument("OUT", "The folder to write, or a single file if it ends in .safetensors.")],
    to: Annotated[str, typer.Option("--to", help="safetensors (in the layout of Hugging Face) or orbax (a step).")],
    step: Step = None,
    part: Part = None,
    only: Only = None,
    op: Operations = None,
    transforms: File = None,
    shard_gb: Annotated[
        float | None,
        typer.Option("--shard-gb", help="safetensors: the most GB of tensors in one file.", show_default="5.0"),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option("--separator", help="safetensors: the text between the keys of a path.", show_default="."),
    ] = None,
    item: Annotated[
        str | None, option("--item", help_text="orbax: the name of the item. Default: that of the checkpointable.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the tree of a checkpoint for another tool: as safetensors files, or as a step for Orbax."""
    form = _form(to, out, shard_gb, separator, item)
    opened, final = open_at(BACKEND, absolute(path), step), absolute(out)
    source, name, plan = _prepared(opened, part, only, _chosen_operations(transforms, op), not as_json)
    others = [] if part else [each.name for each in opened.committed.manifest.parts if each.name != name]
    document: dict[str, Any] = {"from": opened.path, "to": final, "format": to, "plan": plan, "skipped": opened.skipped}
    if dry_run:
        document |= _to_be_written(source, [name])
    else:
        refuse_destination(BACKEND, final)
        write = _write_safetensors if to == "safetensors" else _write_orbax
        tree = source.part(name)
        with progress("writing", sum(map(nbytes_of, tree.arrays)), as_json) as advance:
            document |= write(source, tree, final, form, advance)
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
    """Return the numbers of leaves and bytes of some parts of a checkpoint."""
    leaves = sum(name.partition("/")[0] in parts for name in leaves_by_name(source))
    return {"leaves": leaves, "bytes": sum(part_bytes(source, name) for name in parts)}


def _print_dry_run(document: dict[str, Any]) -> None:
    leaves, size = counted(document["leaves"], "leaf", "leaves"), bytes_text(document["bytes"])
    print_text(f"{document['to']}: would have {leaves}, {size}")


class _Form(NamedTuple):
    """The options of the format to write."""

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
    shard_bytes = SHARD_BYTES if shard_gb is None else shard_gb * GB
    if not 1 <= shard_bytes < math.inf:  # also refuses nan
        refuse("--shard-gb", "a number of GB above 0", shard_gb)
    own_separator = SEPARATOR if separator is None else text("--separator", separator)
    return _Form(int(shard_bytes), own_separator, item, single_file)


def _write_safetensors(
    source: Opened, part: PartRecord, out: str, form: _Form, advance: ReadProgress
) -> dict[str, Any]:
    from jaxckpt_train.formats.safetensors import export_safetensors

    custom = metadata_of(source).get("custom_metadata")
    metadata = (
        {name: text for name, text in custom.items() if isinstance(text, str)} if isinstance(custom, dict) else {}
    )
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
        metadata=metadata | {"format": "pt"},
        progress=advance,
    )
    keys, notes = found.prng_keys, []
    if keys:
        more = f" and {len(keys) - MOST_NAMED:,} more" if len(keys) > MOST_NAMED else ""
        notes = [
            f"{counted(len(keys), 'PRNG key is', 'PRNG keys are')} written as plain integers, because safetensors has "
            f"no keys: {', '.join(keys[:MOST_NAMED])}{more}. They cannot be loaded into a target with keys. Use --op "
            "'drop PATTERN' to leave them out."
        ]
    document = {"bytes": found.nbytes, "files": list(found.files), "left_out": list(found.left_out)}
    return {**document, "prng_keys": list(keys), "notes": notes}


def _write_orbax(source: Opened, part: PartRecord, out: str, form: _Form, advance: ReadProgress) -> dict[str, Any]:
    from jaxckpt_train.formats.orbax_write import export_orbax, is_nnx_state

    item = export_orbax(
        source.files, source.committed, part, BACKEND, out, source.settings, item=form.item, progress=advance
    )
    notes = [_NNX] if is_nnx_state(part, source.path) else []
    return {"bytes": sum(map(nbytes_of, part.arrays)), "files": [item], "left_out": [], "notes": notes}


def import_(
    path: Checkpoint,
    out: Out,
    step: Step = None,
    part: Annotated[
        str | None,
        option(
            "--part", "-p", help_text="The checkpointable. Default: all; operations change 'state' or the only tree."
        ),
    ] = None,
    only: Only = None,
    op: Operations = None,
    transforms: File = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint of Orbax, PyTorch, safetensors or Flax, and transform its tree if asked to.

    Arrays pass through memory in pieces, and the result has digests. If large chunks have to be decoded, the command
    restarts itself with GLIBC_TUNABLES set for huge pages, which halves the time.
    """
    opened = open_at(BACKEND, absolute(path), step)
    source, name, plan = _prepared(opened, part, only, _chosen_operations(transforms, op), not as_json)
    document = {"from": opened.path, "kind": opened.kind, "to": absolute(out), "plan": plan, "skipped": opened.skipped}
    info = {"created": _now_text(), **metadata_of(opened), **import_info(opened)}
    _convert(source, None if part is None else [name], document, info, "", dry_run, read_budget_mib, as_json)


def _convert(
    source: Opened,
    parts: list[str] | None,
    document: dict[str, Any],
    info: dict[str, Any],
    remark: str,
    dry_run: bool,
    read_budget_mib: int,
    as_json: bool,
) -> None:
    """Write some parts of the result of `_prepared`, unless this is a dry run, and print what was written.

    `document` has what is known so far for JSON, with the path of the result in "to". `info` is for the manifest, and
    `remark` the end of the printed line.
    """
    final = document["to"]
    if dry_run:
        document |= _to_be_written(source, parts or [each.name for each in source.committed.manifest.parts])
    else:
        refuse_existing_name(final)
        refuse_temporary_name(final)
        refuse_destination(BACKEND, final)
        remove_stale_temporaries(BACKEND, final)
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
        document["bytes"] = committed.data_bytes
    if as_json:
        print_json(document)
    elif dry_run:
        _print_dry_run(document)
    else:
        print_text(f"{final}: {bytes_text(document['bytes'])}{remark}")


def _now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def average(
    run: Run,
    out: Out,
    last: Annotated[
        int | None,
        typer.Option("--last", "-l", min=2, help="The number of newest valid steps.", show_default=str(LAST)),
    ] = None,
    step: Annotated[
        list[float] | None, step_option("--step", "-s", help_text="The steps to average, instead of the newest.")
    ] = None,
    leaves: Annotated[
        str,
        typer.Option("--leaves", help="Leaf path or pattern to average. Other leaves are taken from the newest step."),
    ] = "params/**",
    part: Part = None,
    only: Only = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Write a checkpoint whose parameters are the mean of those of the last steps of a run.

    Floating-point leaves are summed in double precision and rounded once. Everything else is taken from the newest of
    the steps.
    """
    path = absolute(run)
    chosen, skipped = _steps(path, last, step)
    paths, steps = [f"{path}/{each.name}" for each in chosen], [each.step for each in chosen]
    opened = open_at(BACKEND, paths[-1])
    operation = Average(leaves, paths[:-1], opened.part(part).name)
    source, name, plan = _prepared(opened, part, only, (operation,), not as_json)
    document = {"run": path, "steps": steps, "to": absolute(out), "plan": plan, "skipped": skipped}
    about = {key: value for key, value in metadata_of(opened).items() if key not in ("metrics", "temporary")}
    info = {**about, "created": _now_text(), **import_info(opened), "averaged_steps": steps}
    remark = f", the mean of steps {', '.join(map(str, steps))}"
    _convert(source, None if part is None else [name], document, info, remark, dry_run, read_budget_mib, as_json)


def _steps(path: str, last: int | None, wanted: list[float] | None) -> tuple[list[StepStatus], list[str]]:
    """Return the steps to average, the newest last, and the names of the damaged steps that are skipped."""
    statuses = inspect_run(BACKEND, path)
    valid = [each for each in statuses if each.is_restorable]
    if wanted:
        if last is not None:
            raise SettingsError("--last and --step: expected one of them, found both")
        return _named(path, valid, wanted), []
    if len(valid) < max(2, last or 0):
        raise StepNotFoundError(f"{path}: expected {max(2, last or 0)} valid steps to average, found {len(valid)}")
    taken = valid[-(last or LAST) :]
    bad = [each for each in statuses if each.problem is not None and each.step > taken[0].step]
    for each in bad:
        if each.refusal is not None:
            raise each.refusal  # the step is unreadable, but it may be valid
        _log.warning("%s/%s is skipped: %s", path, each.name, each.problem)
    return taken, [each.name for each in bad]


def _named(path: str, valid: list[StepStatus], wanted: list[float]) -> list[StepStatus]:
    found = [each for each in valid if each.step in wanted]
    missing = set(wanted).difference(each.step for each in found)
    if missing:
        there = ", ".join(str(each.step) for each in valid[-LAST:]) or "none"
        raise StepNotFoundError(
            f"{path}: has no valid step {', '.join(map(str, missing))}; the last valid steps are {there}"
        )
    if len(found) < 2:
        raise SettingsError(f"--step: expected at least two steps, found {', '.join(map(str, wanted))}")
    return found
