"""Numbers that Orbax stores as arrays without dimensions: Python's own, which are leaves of their own here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxckpt_train.formats.foreign_calls import foreign_call
from jaxckpt_train.formats.orbax_arrays import OrbaxArray
from jaxckpt_train.formats.tensorstore_calls import read_error
from jaxckpt_train.tree.leaf_records import ArrayLeaf, LeafRecord, record_value


def scalar_leaves(directory: str, arrays: Mapping[str, OrbaxArray]) -> dict[str, LeafRecord]:
    """The records of such leaves. They are read now, all at once: there may be thousands.

    Raises:
        CorruptCheckpointError: one is damaged.
        StorageError: the system refused to read one.
    """
    found: dict[str, LeafRecord] = {leaf: ArrayLeaf("scalar") for leaf in arrays}
    futures = {leaf: _read(array) for leaf, array in arrays.items() if array.record.shape == ()}
    for leaf, future in futures.items():
        try:
            with foreign_call():
                value = future.result()
        except ValueError as error:
            raise read_error(error, f"{directory}: leaf {leaf!r} cannot be read") from error
        record = record_value(leaf, value.item())
        if record is not None:
            found[leaf] = record
    return found


def _read(array: OrbaxArray) -> Any:
    """Begin to read all of it."""
    assert array.bounds is not None
    array.bounds.check()
    return array.store.read()
