"""The leaves of a checkpoint with their sizes, and the files of checkpointables that are no trees."""

from __future__ import annotations

import dataclasses
import math

from jaxckpt_train.looking.leaf_diff import leaves_by_name
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.tree.leaf_records import describe_saved

FILE = "file"  # the form of what is no leaf


@dataclasses.dataclass(frozen=True)
class LeafSize:
    """A leaf or a file.

    Attributes:
        name: its checkpointable and leaf path.
        form: dtype and shape, or kind.
        bytes: of its data; 0: it is no array.
    """

    name: str
    form: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class TreeSizes:
    """What a step holds.

    Attributes:
        step, name: of the step and its directory.
        leaves: in the order of the tree.
    """

    step: int | None
    name: str
    leaves: tuple[LeafSize, ...]


def tree_sizes(opened: Opened, step: int | None) -> TreeSizes:
    """The sizes of all that a checkpoint holds.

    Raises:
        CorruptCheckpointError: the record of a tree is damaged.
    """
    leaves = [
        LeafSize(name, describe_saved(leaf, array), 0 if array is None else array_bytes(array))
        for name, (leaf, array) in leaves_by_name(opened).items()
    ]
    files = [
        LeafSize(f"{part.name}/{file.file.removeprefix(part.name + '/')}", FILE, file.bytes)
        for part in opened.committed.manifest.parts
        for file in part.files
    ]
    return TreeSizes(step, opened.path.rpartition("/")[2], (*leaves, *files))


def array_bytes(array: ArrayRecord) -> int:
    """Bytes of the data of an array."""
    return math.prod(array.shape) * DTYPES[array.dtype].itemsize
