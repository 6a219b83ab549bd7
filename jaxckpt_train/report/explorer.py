"""The section with the tree of the newest step: what its script is given, and what is there without a script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from jaxckpt_train.report.gathering import Gathered
from jaxckpt_train.report.leaf_sizes import FILE, LeafSize
from jaxckpt_train.report.limits import Limits
from jaxckpt_train.report.markup import Html, element
from jaxckpt_train.report.page_parts import note, section, table_html
from jaxckpt_train.report.quantities import bytes_text, counted
from jaxckpt_train.report.tables import largest_table

HELP = "In a pattern * stands for anything within a key, ** for anything. Without them a part of a path is enough."


def explorer_data(gathered: Gathered, limits: Limits) -> dict[str, Any]:
    """The leaves with their forms, sizes, and relative changes in the last pair of steps, as the script reads them."""
    if gathered.tree is None:
        return {"leaves": [], "forms": []}
    pairs = [pair for pair in gathered.changes.pairs if not pair.problem]
    last = pairs[-1] if pairs and pairs[-1].after == gathered.tree.step else None
    moved = {leaf.name: leaf.relative for leaf in last.leaves} if last is not None else {}
    forms: dict[str, int] = {}
    leaves = []
    for leaf in _chosen(gathered.tree.leaves, limits):
        is_compared = last is not None and leaf.form != FILE
        change = moved.get(leaf.name, 0.0) if is_compared else None
        leaves.append([leaf.name, forms.setdefault(leaf.form, len(forms)), leaf.bytes, _change(change)])
    return {"leaves": leaves, "forms": list(forms), "pair": None if last is None else [last.before, last.after]}


def _change(change: float | None) -> float | str | None:
    """A change as JSON has it, with the digits that are shown."""
    if change is None or math.isfinite(change):
        return None if change is None else float(f"{change:.3g}")
    return str(change)


def _chosen(leaves: Sequence[LeafSize], limits: Limits) -> list[LeafSize]:
    """As many as a page has room for, the largest; in the order of the tree."""
    room, chosen = limits.leaf_letters, set[int]()
    for number in sorted(range(len(leaves)), key=lambda number: -leaves[number].bytes)[: limits.leaves]:
        room -= len(json.dumps(leaves[number].name))
        if room < 0:
            break
        chosen.add(number)
    return [leaf for number, leaf in enumerate(leaves) if number in chosen]


def explorer(gathered: Gathered, limits: Limits) -> Html:
    """The section."""
    tree = gathered.tree
    if tree is None:
        return section("tree", "Tree", note("There is no step that can be restored."))
    total = sum(leaf.bytes for leaf in tree.leaves)
    shown = _chosen(tree.leaves, limits)
    left_out = None
    if len(shown) < len(tree.leaves):
        rest = bytes_text(total - sum(leaf.bytes for leaf in shown))
        left_out = note(f"The {len(tree.leaves) - len(shown):,} smallest leaves, {rest}, are left out.")
    search = element(
        "div",
        element("label", "Search", for_="leaf-pattern"),
        element(
            "input", id="leaf-pattern", type="search", placeholder="kernel, state/params/*/bias or **/mu",
            autocomplete="off", spellcheck="false",
        ),
        element("button", "Sort by size", id="leaf-order", type="button", aria_pressed="false"),
        element("button", "Close all", id="leaf-close", type="button"),
        class_="bar",
    )  # fmt: skip
    return section(
        "tree",
        "Tree",
        element("p", f"Step {tree.step}: {counted(len(tree.leaves), 'leaf', 'leaves')}, {bytes_text(total)}."),
        note(
            "In a pattern * stands for anything within a key, ** for anything. Without them a part of a path will do."
        ),
        left_out,
        element("div", search, class_="needs-script"),
        element("p", "", id="leaf-count", class_="quiet", aria_live="polite"),
        element("div", "", id="leaves"),
        element(
            "details",
            element("summary", "Data: the largest leaves"),
            table_html(largest_table(tree), "Leaves"),
        ),
    )
