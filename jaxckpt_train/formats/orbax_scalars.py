"""Numbers that Orbax stores as arrays without dimensions: Python's own, which are leaves of their own here."""

from __future__ import annotations

from collections.abc import Mapping

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.formats.foreign_calls import foreign_call
from jaxckpt_train.formats.orbax_arrays import TOLD_LETTERS, OrbaxArray
from jaxckpt_train.store.manifest import shown
from jaxckpt_train.tree.leaf_records import ArrayLeaf, LeafRecord, record_value


def scalar_leaves(directory: str, arrays: Mapping[str, OrbaxArray]) -> dict[str, LeafRecord]:
    """The records of such leaves. They are read now, all at once: there may be thousands.

    Raises:
        CorruptCheckpointError: one is damaged.
    """
    futures = {leaf: array.store.read() for leaf, array in arrays.items()}
    found: dict[str, LeafRecord] = {}
    for leaf, future in futures.items():
        try:
            with foreign_call():
                value = future.result()
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{directory}: leaf {leaf!r} cannot be read: {shown(error, TOLD_LETTERS)}"
            ) from error
        record = record_value(leaf, value.item()) if value.shape == () else None
        found[leaf] = ArrayLeaf("scalar") if record is None else record
    return found
