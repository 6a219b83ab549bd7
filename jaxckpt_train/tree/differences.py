"""Gathers how a checkpoint and a target differ, and tells all of it at once, with what helps against it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.leaf_records import LeafRecord, TreeRecord
from jaxckpt_train.tree.mismatch import leaf_difference, missing_line, unexpected_line
from jaxckpt_train.tree.paths import ROOT, escapes_in
from jaxckpt_train.tree.patterns import alike
from jaxckpt_train.tree.static_data import shortened
from jaxckpt_train.tree.target import Want, settled

SHOWN_DIFFERENCES = 50
_Sort = Literal["missing", "without value", "unexpected", "shape", "moved", "other"]


class Differences:
    """The differences of one load.

    Args:
        subject: what is loaded.
        keeps: whether leaves that the checkpoint lacks keep the target's value.
    """

    def __init__(self, subject: str, *, keeps: bool) -> None:
        self._subject, self._keeps = subject, keeps
        self._lines = list[str]()
        self._sorts = set[_Sort]()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def missing(self, name: str, want: Want) -> None:
        """A leaf that the target has and the checkpoint has not."""
        self._lines.append(missing_line(name, want))
        self._sorts.add("without value" if self._keeps else "missing")

    def unexpected(self, name: str, saved: LeafRecord, array: ArrayRecord | None, free: Collection[str]) -> None:
        """A leaf that the checkpoint has and the target has not; of its leaves some are free, and may be meant."""
        near = alike(name, free) if len(self._lines) < SHOWN_DIFFERENCES else []  # more are not shown
        self._lines.append(unexpected_line(name, saved, array, near))
        self._sorts.add("unexpected")

    def unlike(self, line: str, array: ArrayRecord | None, want: Want) -> None:
        """A leaf that both have, with a line that tells how it differs."""
        self._lines.append(line)
        other_shape = array is not None and want.form in ("jax", "numpy") and array.shape != want.shape
        self._sorts.add("shape" if other_shape else "other")

    def moved(self, path: str, saved: str, found: str) -> None:
        """A node without keys whose static data names the children in another order."""
        self._lines.append(
            f"node {path!r}: saved with the static data {shortened(saved)}, the target has {shortened(found)}: "
            "its values would change places, as the type is registered without keys"
        )
        self._sorts.add("moved")

    def raise_all(self) -> None:
        """Raise one MismatchError for all of them, if there are any."""
        raise_differences(self._subject, self._lines, self._advice())

    def _advice(self) -> str:
        helps = []
        if "missing" in self._sorts:
            helps.append('missing="keep" keeps leaves of the target that the checkpoint lacks')
        if "without value" in self._sorts:
            helps.append('missing="keep" keeps arrays, and a jax.ShapeDtypeStruct is none: give arrays there')
        if self._sorts & {"missing", "without value", "unexpected"}:
            helps.append("rename= gives saved leaves other paths")
        if "moved" in self._sorts:
            helps.append('rename={"node/0/**": "node/1/**", ...} gives each saved position its new one')
        if "shape" in self._sorts:
            helps.append("surgery= changes shapes (pad, truncate, reshape, transpose, ...)")
        if self._sorts & {"unexpected", "shape", "other"}:
            helps.append("only= leaves leaves out")
        return (
            "If the model has changed, begin with what fits, by options of `jaxckpt_train.load` (and save that) or "
            f"`init_from`: {'; '.join(helps)}"
        )


def tree_differences(
    subject: str, record: TreeRecord, arrays: Mapping[str, ArrayRecord], wants: Mapping[str, Want]
) -> Differences:
    """How a stored tree and a target differ, leaf by leaf under the same paths.

    Args:
        subject: what is compared.
        record: the tree as it is stored.
        arrays: its arrays by leaf path.
        wants: what the leaves of the target want, by leaf path.
    """
    found = Differences(subject, keeps=False)
    skipped = tuple("" if name == ROOT else f"{name}/" for name, want in wants.items() if want.form == "skip")
    for name, wanted in wants.items():
        saved, array = record.leaves.get(name), arrays.get(name)
        want = wanted if saved is None else settled(wanted, saved, array, has_types=True)
        line = None if saved is None else leaf_difference(name, saved, array, want, cast=False)
        if saved is None and want.form != "skip":
            found.missing(name, want)
        elif line is not None:
            found.unlike(line, array, want)
    free = [name for name in wants if name not in record.leaves]
    for name, saved in record.leaves.items():
        if name not in wants and not name.startswith(skipped):
            found.unexpected(name, saved, arrays.get(name), free)
    return found


def raise_differences(subject: str, lines: Sequence[str], advice: str = "") -> None:
    """Raise one MismatchError for all differences, if there are any; what helps comes last."""
    if not lines:
        return
    shown = "\n".join(f"  {line}" for line in lines[:SHOWN_DIFFERENCES])
    more = f"\n  and {len(lines) - SHOWN_DIFFERENCES} more" if len(lines) > SHOWN_DIFFERENCES else ""
    raise MismatchError(
        f"{subject}: the checkpoint and the target differ in {len(lines)} "
        f"{'leaf' if len(lines) == 1 else 'leaves'}; nothing was read{escapes_in(shown)}:\n{shown}{more}"
        + (f"\n{advice}" if advice else ""),
        tuple(lines),
    )
