"""What a position in a Grain pipeline counts: something that means the same to any number of processes, or its share.

Grain is never imported here: classes are known by their names, so a newer Grain's unknown ones count as a share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

# Steps that give one element for each that they take, in the same order.
_ONE_TO_ONE = frozenset(
    {
        "_MapDatasetIterator",
        "ThreadPrefetchDatasetIterator",
        "MapMapDataset",
    }
)
_FROM_MAP, _ELASTIC = "PrefetchDatasetIterator", "_ElasticMapDatasetIterator"
_BATCH, _SLICE = "BatchMapDataset", "SliceMapDataset"


class Counted(NamedTuple):
    """What a position counts.

    Attributes:
        unit: "records": of the whole data; "batches": of all processes together; "share": of one process's share.
        records: in a batch of all processes together; 0: it counts no batches.
    """

    unit: str
    records: int = 0


SHARE = Counted("share")


def what_it_counts(iterator: Any) -> Counted:
    """What the position of an iterator counts.

    Of `ElasticIterator` it is records of the whole data. Of `dataset.shuffle()[i::n].batch(b // n).to_iter_dataset()`
    it is batches of `b` records, and so of `dataset.shuffle().batch(b).to_iter_dataset()`. If the batch comes after
    `to_iter_dataset`, or a shuffle or repeat after the slice, it is elements of the share of this process, which
    another number of processes cuts otherwise.
    """
    iterator = getattr(iterator, "_default_iterator", iterator)  # an ElasticIterator that is its own iterator
    for node in _chain(iterator):
        name = type(node).__name__
        if name == _ELASTIC:
            return Counted("records")
        if name == _FROM_MAP:
            return _of_map(getattr(node, "_map_parent", None))
        if name not in _ONE_TO_ONE:
            return SHARE
    return SHARE


def _of_map(dataset: Any) -> Counted:
    batch, is_global = 0, False
    for node in _chain(dataset):
        name = type(node).__name__
        if name == _SLICE:
            step = _whole(node, "_step")
            if is_global or not batch or not _is_every_so_manieth(node, step):
                return SHARE
            if step > 1:
                return Counted("batches", batch * step)
        if name == _BATCH and not is_global:
            batch = (batch or 1) * _whole(node, "_batch_size")
        elif name not in _ONE_TO_ONE:
            is_global = True  # of a shuffle of a share: seen by the slice that comes before it
        if len(getattr(node, "_parents", ())) > 1:
            return SHARE  # a mix or a zip may be one of shares
    return Counted("batches", batch) if batch else SHARE


def _is_every_so_manieth(node: Any, step: int) -> bool:
    """Whether a slice is `[i::n]` with an i below n; parts that lie side by side begin elsewhere for another n."""
    start, stop, length = (getattr(node, name, None) for name in ("_start", "_stop", "_parent_length"))
    return type(start) is int and 0 <= start < step and stop is not None and stop == length


def _whole(node: Any, name: str) -> int:
    """A number that this version of Grain keeps there; 0: it does not."""
    found = getattr(node, name, None)
    return found if type(found) is int and found > 0 else 0


def _chain(node: Any) -> Iterator[Any]:
    """A step, and those before it, as long as each has one."""
    while node is not None:
        yield node
        parents = getattr(node, "_parents", ())
        node = parents[0] if isinstance(parents, (list, tuple)) and len(parents) == 1 else None
