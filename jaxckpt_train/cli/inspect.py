"""The commands that show runs and checkpoints: `jaxckpt ls`, `show`, `stats` and `diff`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from jaxckpt_train.cli.output import (
    BACKEND,
    Checkpoint,
    Code,
    Json,
    Part,
    Patterns,
    Run,
    Step,
    absolute,
    age_text,
    bytes_text,
    code_of,
    number_text,
    print_columns,
    print_json,
    print_text,
    progress,
    reported_errors,
    step_number,
    step_option,
)
from jaxckpt_train.errors import CheckpointError, MismatchError, NotACheckpointError
from jaxckpt_train.inspection.diff import (
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
from jaxckpt_train.inspection.runs import (
    StepStatus,
    describe_other,
    inspect_run,
    metadata_of,
    nbytes_of,
    open_at,
    part_bytes,
)
from jaxckpt_train.inspection.stats import BINS, Histogram, LeafStats, has_complex
from jaxckpt_train.opened import Opened
from jaxckpt_train.pytree.leaves import LeafRecord, describe_saved, has_tree, python_value
from jaxckpt_train.pytree.paths import Only, describe_keys, idle_pattern, leaf_filter, suggestion
from jaxckpt_train.run.catalog import newest_orbax_step
from jaxckpt_train.store.backends.local import is_file
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord, FileRecord

MAX_CHARACTERS = 60
MOST_EXACT = 1 << 53
MOST_VALUE_BYTES = 1 << 20
MAX_VALUE_CHARACTERS = 4000
MOST_FILES = 8  # printed files of one checkpointable
_ONLY = {"only_a": "only in the first", "only_b": "only in the second"}
First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, step or run.", show_default=False)]
Second = Annotated[
    str, typer.Argument(metavar="B", help="The checkpoint, step or run to compare with A.", show_default=False)
]
StepOfA = Annotated[str | None, step_option("--step-a", help_text="Of a run: which step of A.")]
StepOfB = Annotated[str | None, step_option("--step-b", help_text="Of a run: which step of B.")]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", "-o", help="Leaf paths or patterns to compare.", show_default=False)
]
Selected = Callable[[str], bool]
BARS = " ▁▂▃▄▅▆▇█"
MOST_NAMED = 5
WithHistogram = Annotated[
    bool,
    typer.Option(
        "--histogram/--no-histogram", help="Show counts of values in bins of equal width; needs a second read."
    ),
]


def show(
    path: Checkpoint, patterns: Patterns = None, step: Step = None, part: Part = None, as_json: Json = False
) -> None:
    """Show a checkpoint: leaf paths, shapes, dtypes, shardings, sizes, and JSON items. Reads no arrays."""
    with reported_errors(as_json):
        opened = open_at(BACKEND, absolute(path), step_number(step))
        leaves = chosen_leaves(opened, part, patterns)
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
        return _Item(part, file.file, json.loads(read_file(opened, file).tobytes(), parse_int=_whole))
    except CheckpointError as error:
        return _Item(part, file.file, why_not=str(error), error=error)
    except (ValueError, RecursionError):
        return _Item(part, file.file, why_not="not JSON")


def _whole(digits: str) -> int | str:
    return digits if len(digits) > len(str(MOST_EXACT)) or abs(int(digits)) > MOST_EXACT else int(digits)


def chosen_leaves(
    opened: Opened, part: str | None, patterns: list[str] | None
) -> dict[str, tuple[LeafRecord, ArrayRecord | None]]:
    """Return the leaves that the options select, by `checkpointable/leaf path`.

    A pattern may match the leaf path, or the leaf path after the name of the checkpointable.

    Raises:
        MismatchError: a pattern selects no leaf.
    """
    leaves = leaves_by_name(opened)
    if part is not None:
        opened.part(part)
        leaves = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{part}/")}
    if not patterns:
        return leaves
    idle = idle_pattern(patterns, [*leaves, *(name.partition("/")[2] for name in leaves)])
    if idle is not None:
        paths = [name.partition("/")[2] for name in leaves]
        raise MismatchError(
            f"{opened.path}: {idle!r} selects none of {len(leaves)} leaves{suggestion(idle, paths)}: "
            f"{describe_keys(str(idle), paths)}"
        )
    selected = _leaf_selection(patterns)
    return {name: leaf for name, leaf in leaves.items() if selected(name)}


def _leaf_selection(only: Only) -> Callable[[str], bool]:
    """Return a predicate of `checkpointable/leaf path`."""
    chosen = leaf_filter(only)
    return lambda name: chosen(name) or chosen(name.partition("/")[2])


def _checkpoint_json(
    opened: Opened, leaves: dict[str, tuple[LeafRecord, ArrayRecord | None]], items: Sequence[_Item]
) -> dict[str, Any]:
    parts = opened.committed.manifest.parts
    return {
        "path": opened.path,
        "kind": opened.kind,
        **metadata_of(opened),
        "parts": [
            {"name": part.name, "kind": part.kind, "bytes": part_bytes(opened, part.name)}
            | _items_json([item for item in items if item.part == part.name])
            for part in parts
        ],
        "bytes": opened.committed.data_bytes,
        "leaves": [_leaf_json(opened, name, *leaf) for name, leaf in leaves.items()],
        "skipped": opened.skipped,
    }


def _items_json(items: Sequence[_Item]) -> dict[str, Any]:
    found = [{"file": item.file, "value": item.value, "problem": item.why_not or None} for item in items]
    return {"items": found} if found else {}


def _leaf_json(opened: Opened, name: str, leaf: LeafRecord, array: ArrayRecord | None) -> dict[str, Any]:
    part, _, path = name.partition("/")
    found: dict[str, Any] = {"part": part, "path": path, "form": describe_saved(leaf, array)}
    if array is None:
        return {**found, "value": json_value(python_value(name, leaf, opened.path))}
    return {
        **found,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "bytes": nbytes_of(array),
        "chunks": len(array.chunks),
        "sharding": array.sharding,
    }


def json_value(value: Any) -> Any:
    """Return a value for JSON. Large integers, which readers would round, complex numbers and bytes become text."""
    if isinstance(value, int) and abs(value) > MOST_EXACT:
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def value_text(value: Any) -> str:
    """Return a value as text, truncated if it is long."""
    return _cut(repr(value), MAX_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _print_checkpoint(
    opened: Opened, leaves: dict[str, tuple[LeafRecord, ArrayRecord | None]], items: Sequence[_Item]
) -> None:
    about = metadata_of(opened)
    print_text(f"{opened.path}  ({opened.kind})")
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
    rows = [
        [
            name,
            describe_saved(leaf, array),
            bytes_text(nbytes_of(array)) if array else "",
            _last(opened, name, leaf, array),
        ]
        for name, (leaf, array) in leaves.items()
    ]
    print_columns(["leaf", "form", "size", "sharding or value"], rows, [False, False, True, False])
    total = sum(nbytes_of(array) for _, array in leaves.values())
    print(f"{len(leaves):,} {'leaf' if len(leaves) == 1 else 'leaves'}, {bytes_text(total)}")


def _last(opened: Opened, name: str, leaf: LeafRecord, array: ArrayRecord | None) -> str:
    if array is None:
        return value_text(python_value(name, leaf, opened.path))
    sharding = array.sharding
    if not isinstance(sharding, dict):
        return ""
    mesh, spec = sharding.get("mesh"), sharding.get("spec")
    if not isinstance(mesh, dict) or not isinstance(spec, list):
        return ""
    return f"{'x'.join(map(str, mesh.values()))} {','.join('-' if each is None else str(each) for each in spec)}"


def diff(
    a: First, b: Second, step_a: StepOfA = None, step_b: StepOfB = None, only: OnlyOption = None, as_json: Json = False
) -> None:
    """Compare two checkpoints: structure and every value, bit by bit. Equal leaves are folded into one line.

    Exits with 0 if everything is equal, and with 1 if something differs.
    """
    with reported_errors(as_json):
        of_a, of_b = step_number(step_a), step_number(step_b)
        first, second = open_at(BACKEND, absolute(a), of_a), open_at(BACKEND, absolute(b), of_b)
        _refuse_idle_patterns(first, second, only or [])
        selected = _selection(only or None)
        total = sum(_bytes(each, selected) for each in (first, second))
        with progress("comparing", total, as_json) as advance:
            found = _compare(first, second, selected, advance)
        if as_json:
            print_json(_diff_json(first, second, found))
        else:
            _print_diff(found)
        if any(each.kind != "equal" for each in found):
            raise typer.Exit(int(Code.WRONG))


def _selection(only: list[str] | None) -> Selected:
    """Return a predicate of `checkpointable/leaf path`, and of names of checkpointables that are not trees."""
    chosen = leaf_filter(only)
    return lambda name: chosen(name) or chosen(name.partition("/")[2]) or ("/" not in name and chosen(f"{name}/"))


def _refuse_idle_patterns(first: Opened, second: Opened, patterns: list[str]) -> None:
    """Raise MismatchError for a pattern that selects nothing in either checkpoint, which would make them equal."""
    leaves = leaves_by_name(first).keys() | leaves_by_name(second).keys() if patterns else set()
    others = parts_to_compare(first, second)
    for pattern in patterns:
        if not any(map(_selection([pattern]), [*leaves, *others])):
            paths = sorted(name.partition("/")[2] for name in leaves)
            raise MismatchError(
                f"{first.path}, {second.path}: {pattern!r} selects none of the {len(leaves)} leaves of both"
                f"{suggestion(pattern, paths)}: {describe_keys(pattern, paths)}"
            )


def _compare(first: Opened, second: Opened, selected: Selected, advance: Callable[[int], object]) -> list[LeafDiff]:
    containers = {each.name: each for each in diff_containers(first, second, selected)}
    leaves = diff_leaves(first, second, selected, advance)
    return [
        *diff_parts(first, second, selected),
        *containers.values(),
        *(each for each in leaves if each.name not in containers),  # an empty container is a leaf too
    ]


def _bytes(opened: Opened, selected: Selected) -> int:
    return sum(nbytes_of(array) for name, (_, array) in leaves_by_name(opened).items() if selected(name))


def _diff_json(first: Opened, second: Opened, found: list[LeafDiff]) -> dict[str, Any]:
    return {
        "a": first.path,
        "b": second.path,
        "equal": sum(each.kind == "equal" for each in found),
        "differences": [
            {
                "part": each.name.partition("/")[0],
                "path": each.name.partition("/")[2],
                "kind": each.kind,
                "a": each.a or None,
                "b": each.b or None,
                "value_a": json_value(each.value_a),
                "value_b": json_value(each.value_b),
                "differing": each.differing,
                "count": each.count,
                "max_abs": each.max_abs,
                "relative_norm": each.relative,
            }
            for each in found
            if each.kind != "equal"
        ],
        "skipped_a": first.skipped,
        "skipped_b": second.skipped,
    }


def _print_diff(found: list[LeafDiff]) -> None:
    rows = [_row(each) for each in found if each.kind != "equal"]
    if rows:
        print_columns(["leaf", "what", "differing", "max abs", "relative norm"], rows, [False, False, True, True, True])
    print(f"{_count_text([each for each in found if each.kind == 'equal'])} equal, {len(rows):,} differ")


def _count_text(equal: list[LeafDiff]) -> str:
    leaves = sum(map(_is_in_a_tree, equal))
    others = len(equal) - leaves
    text = f"{leaves:,} {'leaf' if leaves == 1 else 'leaves'}"
    if others:
        text += f" and {others:,} other {'checkpointable' if others == 1 else 'checkpointables'}"
    return f"{text} {'is' if len(equal) == leaves == 1 else 'are'}"


def _is_in_a_tree(each: LeafDiff) -> bool:
    return "/" in each.name


def _row(each: LeafDiff) -> list[str]:
    a, b = _side(each.a, each.value_a), _side(each.b, each.value_b)
    if each.kind in _ONLY:
        return [each.name, f"{_ONLY[each.kind]}: {a or b}", "", "", ""]
    if each.kind == "form" or not each.count:
        return [each.name, f"{a} -> {b}", "", "", ""]
    share = f"{each.differing:,} of {each.count:,}{'' if _is_in_a_tree(each) else ' files'}"
    return [each.name, each.a, share, number_text(each.max_abs), number_text(each.relative)]


def _side(form: str, value: Any) -> str:
    """Return the form of a leaf in one of the checkpoints, with its value if it is a plain one."""
    return form if value is None else f"{form} {value_text(value)}"


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
    with reported_errors(as_json):
        opened = open_at(BACKEND, absolute(path), step_number(step))
        chosen = chosen_leaves(opened, part, patterns)
        arrays = {name: array for name, (_, array) in chosen.items() if array is not None}
        if patterns and not arrays:
            raise MismatchError(_no_arrays(opened, patterns, chosen))
        of_complex = {name: array for name, array in arrays.items() if has_complex(DTYPES[array.dtype])}
        total = sum(map(nbytes_of, arrays.values())) * (2 if histogram else 1)
        with progress("reading", total, as_json) as advance:
            found = _read(opened, arrays, advance)
            bins = _histograms(opened, arrays, found, advance) if histogram else {}
        if as_json:
            leaves = [_stats_json(name, found[name], bins.get(name), name in of_complex) for name in found]
            print_json({"path": opened.path, "leaves": leaves, "skipped": opened.skipped})
        elif not found:
            print(f"none of {len(chosen):,} {'leaf' if len(chosen) == 1 else 'leaves'} is an array")
        else:
            _print_stats(found, bins)
            _print_complex([*of_complex])
        if any(each.nan or each.inf for each in found.values()):
            raise typer.Exit(int(Code.WRONG))


def _no_arrays(opened: Opened, patterns: list[str], chosen: dict[str, tuple[LeafRecord, ArrayRecord | None]]) -> str:
    given, first = ", ".join(map(repr, patterns)), next(iter(chosen))
    what = f"{first!r}, {describe_saved(*chosen[first])}"
    more = f", and {len(chosen) - 1} more" if len(chosen) > 1 else ""
    return f"{opened.path}: {given} selects no arrays, only {what}{more}: `jaxckpt show` prints their values"


def _read(opened: Opened, arrays: dict[str, ArrayRecord], advance: Any) -> dict[str, LeafStats]:
    found = {name: LeafStats() for name in arrays}
    wanted = (piece for name, array in arrays.items() for piece in pieces_of(name, (array,)))
    for piece, (values,) in over_pieces((opened,), wanted):
        found[piece.name].add(values)
        advance(piece.nbytes)
    return found


def _histograms(
    opened: Opened, arrays: dict[str, ArrayRecord], found: dict[str, LeafStats], advance: Any
) -> dict[str, Histogram]:
    bins = {
        name: Histogram(each.least, each.most)
        for name, each in found.items()
        if each.least is not None and each.most is not None
    }
    wanted = (piece for name in bins for piece in pieces_of(name, (arrays[name],)))
    for piece, (values,) in over_pieces((opened,), wanted):
        bins[piece.name].add(values)
        advance(piece.nbytes)
    return bins


def _stats_json(name: str, found: LeafStats, bins: Histogram | None, of_magnitudes: bool) -> dict[str, Any]:
    part, _, path = name.partition("/")
    document: dict[str, Any] = {
        "part": part, "path": path, "count": found.count, "min": found.least, "max": found.most, "mean": found.mean,
        "std": found.deviation, "norm": found.norm, "nan": found.nan, "inf": found.inf, "zeros": found.zeros,
        "of_magnitudes": of_magnitudes,
    }  # fmt: skip
    if bins is not None:
        document["histogram"] = {"edges": bins.edges.tolist(), "counts": bins.counts.tolist()}
    return document


def _print_stats(found: dict[str, LeafStats], bins: dict[str, Histogram]) -> None:
    rows = []
    for name, each in found.items():
        numbers = (each.least, each.most, each.mean, each.deviation, each.norm)
        rows.append(
            [name, f"{each.count:,}", *map(number_text, numbers), str(each.nan), str(each.inf), _bar(bins.get(name))]
        )
    headings = ["leaf", "count", "min", "max", "mean", "std", "norm", "nan", "inf", "histogram" if bins else ""]
    print_columns(headings, rows, [False, *[True] * 8, False])


def _print_complex(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        print_text(
            f"the statistics of complex values are those of their magnitudes: {', '.join(names[:MOST_NAMED])}{more}"
        )


def _bar(bins: Histogram | None) -> str:
    if bins is None or not bins.counts.sum():
        return ""
    if len(bins.counts) < BINS:
        return BARS[-1]
    most = int(bins.counts.max())
    return "".join(BARS[0 if not count else max(1, round(count / most * (len(BARS) - 1)))] for count in bins.counts)


def ls(run: Run, as_json: Json = False) -> None:
    """List the steps of a run: size, age, metrics, and visible damage. Reads no arrays.

    Exits with 1 if a step of the current branch cannot be restored, and with 3 if there is no step.
    """
    with reported_errors(as_json):
        directory = absolute(run)
        looks = inspect_run(BACKEND, directory) if not is_file(directory) else []
        if not looks:
            raise NotACheckpointError(f"{directory}: expected a run, found {_other_content(directory)}")
        now = datetime.datetime.now(datetime.UTC)
        if as_json:
            print_json({"run": directory, "steps": [_steps_json(look) for look in looks]})
        else:
            _print_steps(looks, now)
        if any(look.problem is not None for look in looks if look.is_current or look.entry is None):
            raise typer.Exit(int(Code.WRONG))


def _other_content(directory: str) -> str:
    """Describe what the path contains instead of a run, with the command that shows it."""
    found, step = describe_other(BACKEND, directory), newest_orbax_step(BACKEND, directory)
    which = "" if step is None else f" --step {step}"
    return f"{found}: use `jaxckpt show {directory}{which}`" if found else "no steps in it"


def _steps_json(look: StepStatus) -> dict[str, Any]:
    entry = look.entry
    return {
        "step": look.step,
        "name": look.name,
        "bytes": look.nbytes,
        "time": entry.time if entry is not None and entry.has_time else None,
        "metrics": {} if entry is None else dict(entry.metrics or {}),
        "pinned": entry is not None and entry.pinned,
        "temporary": entry is not None and entry.temporary,
        "current": look.is_current,
        "valid": look.problem is None,
        "problem": look.problem,
    }


def _print_steps(looks: list[StepStatus], now: datetime.datetime) -> None:
    names = list(dict.fromkeys(name for look in looks if look.entry for name in look.entry.metrics or {}))
    rows = []
    for look in looks:
        entry = look.entry
        metrics = {} if entry is None else entry.metrics or {}
        age = age_text((now - entry.time).total_seconds()) if entry is not None and entry.has_time else ""
        rows.append(
            [
                str(look.step),
                bytes_text(look.nbytes),
                age,
                *(number_text(metrics.get(name)) for name in names),
                _state(look),
            ]
        )
    print_columns(["step", "size", "age", *names, "state"], rows, [True, True, True, *[True] * len(names), False])


def _state(look: StepStatus) -> str:
    words = []
    if look.entry is not None:
        words += ["pinned"] if look.entry.pinned else []
        words += ["temporary"] if look.entry.temporary else []
        words += [] if look.is_current else ["left behind"]
    words.append("ok" if look.problem is None else look.problem)
    return ", ".join(words)
