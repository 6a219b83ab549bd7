"""`jaxckpt diff`: how two checkpoints differ."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, absolute
from jaxckpt_train.cli.output import Code, number_text, print_columns, print_json, progress, told_errors
from jaxckpt_train.cli.show import json_value, nbytes_of, value_text
from jaxckpt_train.looking.leaf_diff import LeafDiff, diff_leaves, leaves_by_name
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.opened import Opened
from jaxckpt_train.tree.patterns import leaf_filter

_ONLY = {"only_a": "only in the first", "only_b": "only in the second"}
First = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, step or run.", show_default=False)]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)]
StepOfA = Annotated[int | None, typer.Option("--step-a", help="Of a run: which step of A.", show_default=False)]
StepOfB = Annotated[int | None, typer.Option("--step-b", help="Of a run: which step of B.", show_default=False)]
Only = Annotated[
    list[str] | None, typer.Option("--only", "-o", help="Leaf paths or patterns to compare.", show_default=False)
]


def diff(
    a: First, b: Second, step_a: StepOfA = None, step_b: StepOfB = None, only: Only = None, as_json: Json = False
) -> None:
    """Compare two checkpoints: structure and every value, bit by bit. Equal leaves are folded into one line.

    Ends with 0 if all is equal, with 1 if something differs.
    """
    with told_errors(as_json):
        first, second = open_at(BACKEND, absolute(a), step_a), open_at(BACKEND, absolute(b), step_b)
        chosen = leaf_filter(only or None)

        def selected(name: str) -> bool:
            return chosen(name) or chosen(name.partition("/")[2])

        total = sum(_bytes(each, selected) for each in (first, second))
        with progress("comparing", total, as_json) as advance:
            found = list(diff_leaves(first, second, selected, advance))
        if as_json:
            print_json(_json_of(first, second, found))
        else:
            _print(found)
        if any(each.kind != "equal" for each in found):
            raise typer.Exit(int(Code.WRONG))


def _bytes(opened: Opened, selected: Any) -> int:
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
    }


def _print(found: list[LeafDiff]) -> None:
    rows = [_row(each) for each in found if each.kind != "equal"]
    if rows:
        print_columns(["leaf", "what", "differing", "max abs", "relative norm"], rows, [False, False, True, True, True])
    equal = len(found) - len(rows)
    print(f"{equal:,} {'leaf is' if equal == 1 else 'leaves are'} equal, {len(rows):,} differ")


def _row(each: LeafDiff) -> list[str]:
    a, b = _side(each.a, each.value_a), _side(each.b, each.value_b)
    if each.kind in _ONLY:
        return [each.name, f"{_ONLY[each.kind]}: {a or b}", "", "", ""]
    if each.kind == "form" or not each.count:
        return [each.name, f"{a} -> {b}", "", "", ""]
    share = f"{each.differing:,} of {each.count:,}"
    return [each.name, each.a, share, number_text(each.max_abs), number_text(each.relative)]


def _side(form: str, value: Any) -> str:
    """What a leaf is in one of the two; of a plain one with its value."""
    return form if value is None else f"{form} {value_text(value)}"
