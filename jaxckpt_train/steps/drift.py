"""Warns when what a loop saves drifts from what `resume` was given, or its position in the data does not move."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt_train.checkpointables.fingerprint import DATA_NAME
from jaxckpt_train.checkpointables.pytree import JsonHandler
from jaxckpt_train.checkpointables.registry import handler_of
from jaxckpt_train.checkpointables.saving import StagedPart
from jaxckpt_train.errors import CheckpointError, MismatchError
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.differences import tree_differences
from jaxckpt_train.tree.flatten import flatten
from jaxckpt_train.tree.snapshot import Snapshot
from jaxckpt_train.tree.target import Want, wanted

_log = logging.getLogger("jaxckpt_train")


class Drift:
    """What the next start of a loop will ask for, compared with each save. Holds no array.

    Args:
        targets: what `resume` was given, by name.

    Attributes:
        warns_of_position: whether a position that does not move is warned of.
    """

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._wants = {name: wants for name, value in targets.items() if (wants := _wants_of(value)) is not None}
        self._forms: dict[str, Any] = {}
        self._position: tuple[int, Any] | None = None
        self.warns_of_position = True

    def look(self, step: int, parts: Sequence[StagedPart]) -> None:
        """Warn, once of each, if this save does not fit the next start, or has the position in the data of the last."""
        for part in parts:
            if part.name == DATA_NAME and self.warns_of_position:
                self._look_at_position(step, part)
            if part.snapshot is not None and part.name in self._wants:
                form = _form_of(part.snapshot)
                if form != self._forms.get(part.name):
                    self._forms[part.name] = form
                    self._compare(step, part.name, part.snapshot)

    def _compare(self, step: int, name: str, snapshot: Snapshot) -> None:
        arrays = {each.name: ArrayRecord(each.name, each.shape, dtype_name(each.dtype), ()) for each in snapshot.arrays}
        try:
            tree_differences(f"step {step}: {name}", snapshot.record, arrays, self._wants[name]).raise_all()
        except MismatchError as error:
            del self._wants[name]  # it was said
            _log.warning(
                "step %d: %r is not of the form that resume(...) was given: the next start of this program would fail "
                "with the error below. Keep the leaves, shapes and dtypes in each update (cast back what changes, take "
                "out what only one step needs), or give resume(...) a state of the new form.\n%s",
                step,
                name,
                error,
            )

    def _look_at_position(self, step: int, part: StagedPart) -> None:
        found = _position_of(part)
        before, self._position = self._position, (step, found)
        if found is not None and before is not None and before[1] == found and before[0] < step:
            self.warns_of_position = False
            _log.warning(
                "step %d: the position of %r is that of step %d. If the loop takes its batches from another iterator, "
                "a resume would repeat data: take them from the iterator that resume(...) returned. For several epochs "
                "let the data repeat (dataset.repeat()), or hand over each new iterator by ckpt(state, data=iterator). "
                "If one batch serves several updates, call ckpt(...) after the last of them only, or keep the batch in "
                "the state: a resume between them would take the next batch. "
                "If the position starts anew in each epoch, and each save is at the same place of one, all is well",
                step,
                part.name,
                before[0],
            )


def _wants_of(value: Any) -> dict[str, Want] | None:
    """What each leaf of a target wants; None: it is no tree, or none that can be a target, as its first save says."""
    tree_of = getattr(handler_of(value), "tree_of", None)
    if tree_of is None:
        return None
    try:
        flat = flatten(tree_of(value))
        wants = {name: wanted(name, leaf, None) for name, leaf in zip(flat.names, flat.leaves, strict=True)}
    except CheckpointError:
        return None
    return {name: want._replace(sharding=None) for name, want in wants.items()}


def _form_of(snapshot: Snapshot) -> Any:
    leaves = snapshot.record.leaves
    return [*leaves], [*map(type, leaves.values())], [(each.shape, each.dtype) for each in snapshot.arrays]


def _position_of(part: StagedPart) -> Any:
    """What a save holds of the position in the data, to be compared; None: it cannot be."""
    if part.kind == JsonHandler.kind:
        return None
    if part.snapshot is not None:  # the state of an object with get_state
        return None if part.snapshot.arrays else part.snapshot.record.leaves
    return part.value
