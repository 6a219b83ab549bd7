"""`jaxckpt diff`: how two checkpoints differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, absolute, step_number, step_option
from jaxckpt_train.cli.output import Code, number_text, print_columns, print_json, progress, told_errors
from jaxckpt_train.cli.show import json_value, nbytes_of, value_text
from jaxckpt_train.errors import MismatchError
from jaxckpt_train.looking.container_diff import diff_containers
from jaxckpt_train.looking.leaf_diff import LeafDiff, diff_leaves, leaves_by_name
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.looking.part_diff import diff_parts, parts_to_compare
from jaxckpt_train.opened import Opened
from jaxckpt_train.tree.patterns import keys_there, leaf_filter, suggestion

_ONLY = {"only_a": "only in the first", "only_b": "only in the second"}
First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, step or run.", show_default=False)]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)]
StepOfA = Annotated[str | None, step_option("--step-a", told="Of a run: which step of A.")]
StepOfB = Annotated[str | None, step_option("--step-b", told="Of a run: which step of B.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", "-o", help="Leaf paths or patterns to compare.", show_default=False)
]
Selected = Callable[[str], bool]


def diff(
    a: First, b: Second, step_a: StepOfA = None, step_b: StepOfB = None, only: Only = None, as_json: Json = False
) -> None:
    """Compare two checkpoints: structure and every value, bit by bit. Equal leaves are folded into one line.

    Ends with 0 if all is equal, with 1 if something differs.
    """
    with told_errors(as_json):
        of_a, of_b = step_number(step_a), step_number(step_b)
        first, second = open_at(BACKEND, absolute(a), of_a), open_at(BACKEND, absolute(b), of_b)
        _refuse_what_selects_nothing(first, second, only or [])
        selected = _selection(only or None)
        total = sum(_bytes(each, selected) for each in (first, second))
        with progress("comparing", total, as_json) as advance:
            found = _compare(first, second, selected, advance)
        if as_json:
            print_json(_json_of(first, second, found))
        else:
            _print(found)
        if any(each.kind != "equal" for each in found):
            raise typer.Exit(int(Code.WRONG))


def _selection(only: list[str] | None) -> Selected:
    """Of leaf paths with the name of their checkpointable before them, and of such names alone."""
    chosen = leaf_filter(only)
    return lambda name: chosen(name) or chosen(name.partition("/")[2]) or ("/" not in name and chosen(f"{name}/"))


def _refuse_what_selects_nothing(first: Opened, second: Opened, patterns: list[str]) -> None:
    """Raise MismatchError for a pattern that fits nothing in either: that is no reason to call them equal."""
    leaves = leaves_by_name(first).keys() | leaves_by_name(second).keys() if patterns else set()
    others = parts_to_compare(first, second)
    for pattern in patterns:
        if not any(map(_selection([pattern]), [*leaves, *others])):
            paths = sorted(name.partition("/")[2] for name in leaves)
            raise MismatchError(
                f"{first.path}, {second.path}: {pattern!r} selects none of the {len(leaves)} leaves of both"
                f"{suggestion(pattern, paths)}: {keys_there(pattern, paths)}"
            )


def _compare(first: Opened, second: Opened, selected: Selected, advance: Callable[[int], object]) -> list[LeafDiff]:
    containers = {each.name: each for each in diff_containers(first, second, selected)}
    leaves = diff_leaves(first, second, selected, advance)
    return [
        *diff_parts(first, second, selected),
        *containers.values(),
        *(each for each in leaves if each.name not in containers),  # one without children is a leaf, too
    ]


def _bytes(opened: Opened, selected: Selected) -> int:
    return sum(nbytes_of(array) for name, (_, array) in leaves_by_name(opened).items() if selected(name))


def _json_of(first: Opened, second: Opened, found: list[LeafDiff]) -> dict[str, Any]:
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


def _print(found: list[LeafDiff]) -> None:
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
    """What a leaf is in one of the two; of a plain one with its value."""
    return form if value is None else f"{form} {value_text(value)}"
