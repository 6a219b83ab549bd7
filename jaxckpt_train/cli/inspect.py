"""The commands that show runs and checkpoints: `jaxckpt ls`, `show`, `stats`, `diff` and `report`."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Collection
from typing import Annotated, Any, NamedTuple

import typer

from jaxckpt_train.cli.output import (
    BACKEND,
    FAST_TIER_HINT,
    Checkpoint,
    Code,
    FastTier,
    Json,
    Run,
    Step,
    absolute,
    argument,
    code_of,
    host_directory,
    option,
    print_columns,
    print_error,
    print_json,
    print_text,
    progress,
    step_option,
)
from jaxckpt_train.errors import CheckpointError, MismatchError, NotACheckpointError, SettingsError
from jaxckpt_train.inspection.diff import (
    Leaf,
    LeafDiff,
    diff_containers,
    diff_leaves,
    diff_parts,
    leaves_by_name,
    over_pieces,
    parts_to_compare,
    pieces_of,
    read_file,
)
from jaxckpt_train.inspection.fast_tier import has_fast_tier, with_fast_steps
from jaxckpt_train.inspection.runs import StepStatus, inspect_run, metadata_of, nbytes_of, open_at, part_bytes
from jaxckpt_train.inspection.stats import Histogram, LeafStats, has_complex
from jaxckpt_train.inspection.units import age_text, bytes_text, counted, number_text
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.leaves import describe_keys, describe_saved, has_tree, leaf_filter, python_value, suggestion
from jaxckpt_train.run.catalog import foreign_checkpoints
from jaxckpt_train.store.committed import is_committed
from jaxckpt_train.store.files import is_file
from jaxckpt_train.store.manifest import ArrayRecord, FileRecord
from jaxckpt_train.store.segment import DTYPES

MAX_CHARACTERS = 60
MOST_VALUE_BYTES = 1 << 20
MAX_VALUE_CHARACTERS = 4000
MOST_FILES = 8  # printed files of one checkpointable
PAGE = "report.html"
BARS = " ▁▂▃▄▅▆▇█"
_ONLY = {"only_a": "only in the first", "only_b": "only in the second"}
Patterns = Annotated[
    list[str] | None, argument("[PATTERN]...", "Leaf paths such as 'params/*/kernel' or 'opt_state/**'. Default: all.")
]
Part = Annotated[str | None, option("The name of one checkpointable. Default: all.", "--part", "-p")]
WithHistogram = Annotated[bool, typer.Option(help="Show counts of values in bins of equal width; needs a second read.")]


def show(
    path: Checkpoint, patterns: Patterns = None, step: Step = None, part: Part = None, as_json: Json = False
) -> None:
    """Show a checkpoint: leaf paths, shapes, dtypes, shardings, sizes, and JSON items. Reads no arrays."""
    opened = open_at(BACKEND, absolute(path), step)
    leaves = _chosen_leaves(opened, part, patterns)
    items = [] if patterns else _items(opened, part)
    if as_json:
        print_json(_checkpoint_json(opened, leaves, items))
    else:
        _print_checkpoint(opened, leaves, items)
    error = next((item.error for item in items if item.error is not None), None)
    if error is not None:
        raise typer.Exit(int(code_of(error)))


class _Item(NamedTuple):
    """A JSON file of a checkpointable that is not a tree: its value, or the reason why it is not shown."""

    part: str
    file: str
    value: Any = None
    why_not: str = ""
    error: CheckpointError | None = None


def _items(opened: Opened, part: str | None) -> list[_Item]:
    return [
        _item(opened, each.name, file)
        for each in opened.committed.manifest.parts
        if part in (None, each.name) and not has_tree(each)
        for file in each.files
        if file.file.endswith(".json")
    ]


def _item(opened: Opened, part: str, file: FileRecord) -> _Item:
    if file.bytes > MOST_VALUE_BYTES:
        return _Item(part, file.file, why_not=f"{bytes_text(file.bytes)}, not shown")
    try:
        return _Item(part, file.file, json.loads(read_file(opened, file).tobytes()))
    except CheckpointError as error:
        return _Item(part, file.file, why_not=str(error), error=error)
    except (ValueError, RecursionError):
        return _Item(part, file.file, why_not="not JSON")


def _chosen_leaves(opened: Opened, part: str | None, patterns: list[str] | None) -> dict[str, Leaf]:
    leaves = leaves_by_name(opened)
    if part is not None:
        opened.part(part)
        leaves = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{part}/")}
    if not patterns:
        return leaves
    _refuse_idle_patterns(opened.path, patterns, leaves)
    return {name: leaves[name] for name in filter(_selection(patterns), leaves)}


def _selection(only: list[str] | None) -> Callable[[str], bool]:
    """Return a predicate of `checkpointable/leaf path`, and of names of checkpointables that are not trees.

    A pattern may match all of it, or the leaf path after the name of the checkpointable.
    """
    chosen = leaf_filter(only or None)
    return lambda name: chosen(name) or chosen(name.partition("/")[2]) or ("/" not in name and chosen(f"{name}/"))


def _refuse_idle_patterns(
    subject: str, patterns: list[str], leaves: Collection[str], others: Collection[str] = ()
) -> None:
    """Raise MismatchError for a pattern that selects no leaf and none of the other checkpointables."""
    for pattern in patterns:
        if not any(map(_selection([pattern]), [*leaves, *others])):
            paths = [name.partition("/")[2] for name in leaves]
            raise MismatchError(
                f"{subject}: {pattern!r} selects none of {counted(len(leaves), 'leaf', 'leaves')}"
                f"{suggestion(pattern, paths)}: {describe_keys(pattern, paths)}"
            )


def _checkpoint_json(opened: Opened, leaves: dict[str, Leaf], items: list[_Item]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in opened.committed.manifest.parts:
        parts.append({"name": part.name, "kind": part.kind, "bytes": part_bytes(opened, part.name)})
        files = [item for item in items if item.part == part.name]
        if files:
            parts[-1]["items"] = [
                {"file": item.file, "value": item.value, "problem": item.why_not or None} for item in files
            ]
    return {
        "path": opened.location,
        "kind": opened.kind,
        **metadata_of(opened),
        "parts": parts,
        "bytes": opened.committed.data_bytes,
        "leaves": [_leaf_json(opened, name, *leaf) for name, leaf in leaves.items()],
        "skipped": opened.skipped,
    }


def _leaf_json(opened: Opened, name: str, leaf: Any, array: ArrayRecord | None) -> dict[str, Any]:
    part, _, path = name.partition("/")
    found: dict[str, Any] = {"part": part, "path": path, "form": describe_saved(leaf, array)}
    if array is None:
        return {**found, "value": python_value(name, leaf, opened.path)}
    return {
        **found,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "bytes": nbytes_of(array),
        "chunks": len(array.chunks),
        "sharding": array.sharding,
    }


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _print_checkpoint(opened: Opened, leaves: dict[str, Leaf], items: list[_Item]) -> None:
    about = metadata_of(opened)
    print_text(f"{opened.location}  ({opened.kind})")
    for name in ("step", "created", "metrics", "custom_metadata", "versions"):
        if about.get(name) not in (None, {}, ""):
            print_text(f"{name}: {about[name]}")
    for part in opened.committed.manifest.parts:
        print_text(f"part {part.name}: {part.kind}, {bytes_text(part_bytes(opened, part.name))}")
        files = [item for item in items if item.part == part.name]
        for item in files[:MOST_FILES]:
            print_text(f"  {item.file}: {item.why_not or _cut(json.dumps(item.value), MAX_VALUE_CHARACTERS)}")
        if len(files) > MOST_FILES:
            print(f"  and {len(files) - MOST_FILES:,} more files")
    rows = []
    for name, (leaf, array) in leaves.items():
        if array is None:
            last = ["", _cut(repr(python_value(name, leaf, opened.path)))]
        else:
            last = [bytes_text(nbytes_of(array)), _sharding_text(array)]
        rows.append([name, describe_saved(leaf, array), *last])
    print_columns(["leaf", "form", "size", "sharding or value"], rows, [False, False, True, False])
    total = sum(nbytes_of(array) for _, array in leaves.values())
    print(f"{counted(len(leaves), 'leaf', 'leaves')}, {bytes_text(total)}")


def _sharding_text(array: ArrayRecord) -> str:
    sharding = array.sharding if isinstance(array.sharding, dict) else {}
    mesh, spec = sharding.get("mesh"), sharding.get("spec")
    if not isinstance(mesh, dict) or not isinstance(spec, list):
        return ""
    return f"{'x'.join(map(str, mesh.values()))} {','.join('-' if each is None else str(each) for each in spec)}"


def diff(
    a: Annotated[str, argument("A", "A checkpoint, step or run.")],
    b: Annotated[str, argument("B", "The checkpoint, step or run to compare with A.")],
    step_a: Annotated[float | None, step_option("Of a run: which step of A.")] = None,
    step_b: Annotated[float | None, step_option("Of a run: which step of B.")] = None,
    only: Annotated[list[str] | None, option("Leaf paths or patterns to compare.", "--only", "-o")] = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: structure and every value, bit by bit. Equal leaves are folded into one line.

    Exits with 0 if everything is equal, and with 1 if something differs.
    """
    first, second = open_at(BACKEND, absolute(a), step_a), open_at(BACKEND, absolute(b), step_b)
    of_both = leaves_by_name(first), leaves_by_name(second)
    others = parts_to_compare(first, second)
    _refuse_idle_patterns(f"{first.path}, {second.path}", only or [], sorted(of_both[0].keys() | of_both[1]), others)
    selected = _selection(only)
    total = sum(nbytes_of(array) for leaves in of_both for name, (_, array) in leaves.items() if selected(name))
    containers = {each.name: each for each in diff_containers(first, second, selected)}
    with progress("comparing", total, as_json) as advance:
        leaves = diff_leaves(first, second, selected, advance)
    found = [*diff_parts(first, second, selected), *containers.values()]
    found += [each for each in leaves if each.name not in containers]  # an empty container is a leaf too
    equal, differing = ([each for each in found if (each.kind == "equal") is wanted] for wanted in (True, False))
    if as_json:
        print_json(
            {
                "a": first.location,
                "b": second.location,
                "equal": len(equal),
                "differences": [_diff_json(each) for each in differing],
                "skipped_a": first.skipped,
                "skipped_b": second.skipped,
            }
        )
    else:
        headings = ["leaf", "what", "differing", "max abs", "relative norm"]
        if differing:
            print_columns(headings, [_diff_row(each) for each in differing], [False, False, True, True, True])
        print(f"{_count_text(equal)} equal, {len(differing):,} differ")
    if differing:
        raise typer.Exit(int(Code.WRONG))


def _diff_json(each: LeafDiff) -> dict[str, Any]:
    part, _, path = each.name.partition("/")
    return {
        "part": part,
        "path": path,
        "kind": each.kind,
        "a": each.a or None,
        "b": each.b or None,
        "value_a": each.value_a,
        "value_b": each.value_b,
        "differing": each.differing,
        "count": each.count,
        "max_abs": each.max_abs,
        "relative_norm": each.relative,
    }


def _count_text(equal: list[LeafDiff]) -> str:
    leaves = sum("/" in each.name for each in equal)
    others = f" and {counted(len(equal) - leaves, 'other checkpointable')}" if len(equal) > leaves else ""
    return f"{counted(leaves, 'leaf', 'leaves')}{others} {'is' if len(equal) == 1 else 'are'}"


def _diff_row(each: LeafDiff) -> list[str]:
    sides = ((each.a, each.value_a), (each.b, each.value_b))
    a, b = (form if value is None else f"{form} {_cut(repr(value))}" for form, value in sides)
    if each.kind in _ONLY:
        return [each.name, f"{_ONLY[each.kind]}: {a or b}", "", "", ""]
    if each.kind == "form" or not each.count:
        return [each.name, f"{a} -> {b}", "", "", ""]
    share = f"{each.differing:,} of {each.count:,}{'' if '/' in each.name else ' files'}"
    return [each.name, each.a, share, number_text(each.max_abs), number_text(each.relative)]


def stats(
    path: Checkpoint,
    patterns: Patterns = None,
    step: Step = None,
    part: Part = None,
    histogram: WithHistogram = True,
    as_json: Json = False,
) -> None:
    """Print minimum, maximum, mean, norm and a histogram of arrays, and count the values that are not finite.

    For complex arrays, these are computed from the magnitudes. Exits with 1 if a value is NaN or infinite.
    """
    opened = open_at(BACKEND, absolute(path), step)
    chosen = _chosen_leaves(opened, part, patterns)
    arrays = {name: array for name, (_, array) in chosen.items() if array is not None}
    if patterns and not arrays:
        raise MismatchError(f"{opened.path}: {', '.join(patterns)} selects no arrays: see `jaxckpt show` for values")
    found = {name: LeafStats() for name in arrays}
    bins: dict[str, Histogram] = {}
    total = sum(map(nbytes_of, arrays.values())) * (2 if histogram else 1)
    with progress("reading", total, as_json) as advance:
        _add_values(opened, arrays, found, advance)
        if histogram:
            for name, each in found.items():
                if each.least is not None and each.most is not None:
                    bins[name] = Histogram(each.least, each.most)
            _add_values(opened, arrays, bins, advance)
    leaves = [_stats_json(name, array, found[name], bins.get(name)) for name, array in arrays.items()]
    if as_json:
        print_json({"path": opened.location, "leaves": leaves, "skipped": opened.skipped})
    elif not leaves:
        print(f"none of {counted(len(chosen), 'leaf', 'leaves')} is an array")
    else:
        _print_stats(leaves, histogram)
    if any(each.nan or each.inf for each in found.values()):
        raise typer.Exit(int(Code.WRONG))


def _add_values(
    opened: Opened,
    arrays: dict[str, ArrayRecord],
    targets: dict[str, LeafStats] | dict[str, Histogram],
    advance: Callable[[int], None],
) -> None:
    """Read the arrays of the targets, and add their values to them."""
    wanted = (piece for name in targets for piece in pieces_of(name, (arrays[name],)))
    for piece, (values,) in over_pieces((opened,), wanted):
        targets[piece.name].add(values)
        advance(piece.nbytes)


def _stats_json(name: str, array: ArrayRecord, found: LeafStats, bins: Histogram | None) -> dict[str, Any]:
    part, _, path = name.partition("/")
    document: dict[str, Any] = {
        "part": part, "path": path, "count": found.count, "min": found.least, "max": found.most, "mean": found.mean,
        "std": found.deviation, "norm": found.norm, "nan": found.nan, "inf": found.inf, "zeros": found.zeros,
        "of_magnitudes": has_complex(DTYPES[array.dtype]),
    }  # fmt: skip
    if bins is not None:
        document["histogram"] = {"edges": bins.edges.tolist(), "counts": bins.counts.tolist()}
    return document


def _print_stats(leaves: list[dict[str, Any]], histogram: bool) -> None:
    rows = []
    for each in leaves:
        numbers = (number_text(each[key]) for key in ("min", "max", "mean", "std", "norm"))
        counts = each["histogram"]["counts"] if "histogram" in each else []
        name, count = f"{each['part']}/{each['path']}", f"{each['count']:,}"
        rows.append([name, count, *numbers, str(each["nan"]), str(each["inf"]), _bar(counts)])
    headings = ["leaf", "count", "min", "max", "mean", "std", "norm", "nan", "inf", "histogram" if histogram else ""]
    print_columns(headings, rows, [False, *[True] * 8, False])
    if any(each["of_magnitudes"] for each in leaves):
        print("the statistics of complex values are those of their magnitudes")


def _bar(counts: list[int]) -> str:
    most = max(counts, default=0)
    return "".join(BARS[math.ceil(count / most * (len(BARS) - 1))] for count in counts) if most else ""


def ls(run: Run, fast_tier: FastTier = None, as_json: Json = False) -> None:
    """List the steps of a run: size, age, metrics, and visible damage. Reads no arrays.

    With --fast-tier, a column says on which tier each step is, as far as this host has it.

    Exits with 1 if a step of the current branch cannot be restored, and with 3 if there is no step, or no directory of
    the fast tier.
    """
    directory, missing = absolute(run), None
    steps = inspect_run(BACKEND, directory) if not is_file(BACKEND, directory) else []
    if fast_tier is not None:
        try:
            steps = with_fast_steps(BACKEND, directory, host_directory(fast_tier), steps)
        except NotACheckpointError as error:
            if not steps:
                raise
            missing = error
    hint = FAST_TIER_HINT if fast_tier is None and has_fast_tier(BACKEND, directory) else ""
    if not steps:
        found = f"no steps in it; {hint}" if hint else _other_content(directory)
        raise NotACheckpointError(f"{directory}: expected a run, found {found}")
    if as_json:
        print_json({"run": directory, "steps": [_step_json(each) for each in steps]})
    else:
        _print_steps(steps, with_tier=fast_tier is not None)
        if hint:
            print_error(hint)
    if missing is not None:
        print_error(str(missing))
        raise typer.Exit(int(Code.NOTHING))
    if any(each.problem is not None for each in steps if each.is_current or each.entry is None):
        raise typer.Exit(int(Code.WRONG))


def _other_content(directory: str) -> str:
    """Describe what the path contains instead of a run."""
    if is_file(BACKEND, directory):
        found = "a file"
    elif is_committed(BACKEND, directory):
        found = "one checkpoint of this package"
    else:
        others = foreign_checkpoints(BACKEND, directory)
        found = "" if others is None else others.what
    return f"{found}: use `jaxckpt show {directory}`" if found else "no steps in it"


def _step_json(each: StepStatus) -> dict[str, Any]:
    entry = each.entry
    return {
        "step": each.step,
        "name": each.name,
        "bytes": each.nbytes,
        "written_bytes": each.written_bytes,
        "time": entry.time if entry is not None and entry.has_time else None,
        "metrics": {} if entry is None else dict(entry.metrics or {}),
        "pinned": entry is not None and entry.pinned,
        "temporary": entry is not None and entry.temporary,
        "current": each.is_current,
        "valid": each.problem is None,
        "problem": each.problem,
        "tier": each.tier,
        "absent_files": each.absent_files,
    }


def _print_steps(steps: list[StepStatus], *, with_tier: bool) -> None:
    now = datetime.datetime.now(datetime.UTC)
    names = list(dict.fromkeys(name for each in steps if each.entry for name in each.entry.metrics or {}))
    is_shared = any(each.taken_bytes for each in steps)
    rows = []
    for each in steps:
        age, state = "", list[str]()
        metrics = {} if each.entry is None else each.entry.metrics or {}
        if each.entry is not None:
            age = age_text((now - each.entry.time).total_seconds()) if each.entry.has_time else ""
            words = ("pinned", each.entry.pinned), ("temporary", each.entry.temporary)
            state = [word for word, holds in (*words, ("left behind", not each.is_current)) if holds]
        numbers = (number_text(metrics.get(name)) for name in names)
        state += [f"{counted(each.absent_files, 'file')} only on other hosts"] if each.absent_files else []
        state_text = ", ".join([*state, each.problem or "ok"])
        sizes = [bytes_text(size) for size in [each.nbytes, each.written_bytes][: 1 + is_shared]]
        rows.append([str(each.step), *[each.tier][:with_tier], *sizes, age, *numbers, state_text])
    titles = ["step", *["tier"][:with_tier], *["size", "written"][: 1 + is_shared], "age", *names]
    print_columns([*titles, "state"], rows, [*[True] * len(titles), False])


def report(
    run: Run,
    output: Annotated[
        str | None, option(f"The page. Default: {PAGE}, or none with --json.", "--output", "-o", metavar="FILE")
    ] = None,
    changes: Annotated[
        int | None, option("The number of last pairs of steps to compare. Default: a few that read quickly.", least=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about a run: its timeline, where the time went, its steps, metrics and tree.

    The page is self-contained and loads nothing. An existing file is replaced only if it is a report. With --json the
    data is printed. Exits with 1 if a step of the current branch cannot be restored; the page says which.
    """
    # Imported late, because no other command needs these modules.
    from jaxckpt_train.report.changes import plan_changes
    from jaxckpt_train.report.gather import gather, gathered_json, read_run

    directory, now = absolute(run), datetime.datetime.now(datetime.UTC)
    page = absolute(output) if output is not None else None if as_json else absolute(PAGE)
    if page is not None:
        _check_page(page)
    read = read_run(BACKEND, directory)
    plan = plan_changes(read.looks, changes)
    with progress("comparing", plan.bytes, as_json) as advance:
        gathered = gather(BACKEND, read, plan, now, advance)
    if page is not None:
        from jaxckpt_train.report.page import page_of, write_page

        text = page_of(gathered)
        write_page(BACKEND, page, text)
        if not as_json:
            print_text(f"{page}: {bytes_text(len(text.encode()))}")
    if as_json:
        print_json(gathered_json(gathered))
    if gathered.damaged:
        for step in gathered.damaged if not as_json else ():
            print_error(f"{step.name}: {step.problem}")
        raise typer.Exit(int(Code.WRONG))


def _check_page(path: str) -> None:
    """Check early that bokeh and jinja2 are installed, and that the file may be written."""
    from jaxckpt_train.inspection.copying import refuse_within_checkpoint

    try:
        from jaxckpt_train.report.page import check_place
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("bokeh", "jinja2"):
            raise
        raise SettingsError(
            f"report: a page needs the package {package}: pip install 'jaxckpt-train[report]', or use --json without a "
            "page"
        ) from None
    refuse_within_checkpoint(BACKEND, path)
    check_place(BACKEND, path)
