"""`jaxckpt stats`: what the values of arrays are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Part, Patterns, Step, absolute, step_number
from jaxckpt_train.cli.output import Code, number_text, print_columns, print_json, print_text, progress, told_errors
from jaxckpt_train.cli.show import chosen_leaves, nbytes_of
from jaxckpt_train.errors import MismatchError
from jaxckpt_train.looking.leaf_reads import over_pieces, pieces_of
from jaxckpt_train.looking.leaf_stats import BINS, Histogram, LeafStats, has_complex
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.leaf_records import LeafRecord, describe_saved

BARS = " ▁▂▃▄▅▆▇█"
MOST_NAMED = 5
WithHistogram = Annotated[
    bool, typer.Option("--histogram/--no-histogram", help="Counts of values in bins of one width; reads twice.")
]


def stats(
    path: Checkpoint,
    patterns: Patterns = None,
    step: Step = None,
    part: Part = None,
    histogram: WithHistogram = True,
    as_json: Json = False,
) -> None:
    """Tell minimum, maximum, mean, norm and a histogram of arrays, and how many values are not finite.

    Of complex arrays these are of the magnitudes. Ends with 1 if a value is nan or infinite.
    """
    with told_errors(as_json):
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
            leaves = [_json_of(name, found[name], bins.get(name), name in of_complex) for name in found]
            print_json({"path": opened.path, "leaves": leaves, "skipped": opened.skipped})
        elif not found:
            print(f"none of {len(chosen):,} {'leaf' if len(chosen) == 1 else 'leaves'} is an array")
        else:
            _print(found, bins)
            _print_complex([*of_complex])
        if any(each.nan or each.inf for each in found.values()):
            raise typer.Exit(int(Code.WRONG))


def _no_arrays(opened: Opened, patterns: list[str], chosen: dict[str, tuple[LeafRecord, ArrayRecord | None]]) -> str:
    told, first = ", ".join(map(repr, patterns)), next(iter(chosen))
    what = f"{first!r}, {describe_saved(*chosen[first])}"
    more = f", and {len(chosen) - 1} more" if len(chosen) > 1 else ""
    return f"{opened.path}: {told} selects no arrays, only {what}{more}; `jaxckpt show` tells their values"


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


def _json_of(name: str, found: LeafStats, bins: Histogram | None, of_magnitudes: bool) -> dict[str, Any]:
    part, _, path = name.partition("/")
    told: dict[str, Any] = {
        "part": part, "path": path, "count": found.count, "min": found.least, "max": found.most, "mean": found.mean,
        "std": found.deviation, "norm": found.norm, "nan": found.nan, "inf": found.inf, "zeros": found.zeros,
        "of_magnitudes": of_magnitudes,
    }  # fmt: skip
    if bins is not None:
        told["histogram"] = {"edges": bins.edges.tolist(), "counts": bins.counts.tolist()}
    return told


def _print(found: dict[str, LeafStats], bins: dict[str, Histogram]) -> None:
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
        print_text(f"complex, so all but the counts are of magnitudes: {', '.join(names[:MOST_NAMED])}{more}")


def _bar(bins: Histogram | None) -> str:
    if bins is None or not bins.counts.sum():
        return ""
    if len(bins.counts) < BINS:
        return BARS[-1]
    most = int(bins.counts.max())
    return "".join(BARS[0 if not count else max(1, round(count / most * (len(BARS) - 1)))] for count in bins.counts)
