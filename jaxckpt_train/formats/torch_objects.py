"""Objects of a checkpoint of PyTorch that are no tensors, as leaves: numbers, text, and containers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.formats.torch_items import Refused
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.tree.leaf_records import ArrayLeaf, EmptyLeaf, LeafRecord, record_value
from jaxckpt_train.tree.paths import MAX_DEPTH, join, key_text


class _NotPlainError(Exception):
    """It holds what can be no leaf; the text says what."""


class ObjectLeaves:
    """The leaves of objects, gathered.

    Args:
        directory: of the checkpoint, for messages.
        array: makes an array of a tensor; of anything else None.

    Attributes:
        leaves: their records by leaf path.
        containers: the kinds of containers that are no dicts, by path.
        arrays: the arrays among the leaves.
        left_out: what can be no leaf, by the path of the object, and why.
    """

    def __init__(self, directory: str, array: Callable[[Any], np.ndarray | None]) -> None:
        self._directory, self._array, self._seen = directory, array, 0
        self.leaves: dict[str, LeafRecord] = {}
        self.containers: dict[str, str] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.left_out: dict[str, str] = {}

    def add(self, path: str, value: Any) -> None:
        """Add an object at a path, whole or not at all.

        Raises:
            CorruptCheckpointError: it is deeper, or has more leaves, than any that a training has.
        """
        inner = ObjectLeaves(self._directory, self._array)
        inner._seen = self._seen
        try:
            inner._walk(path, value, path.count("/"))
        except (_NotPlainError, UnsupportedLeafError) as error:
            self.left_out[path] = str(error)
        else:
            self.leaves |= inner.leaves
            self.containers |= inner.containers
            self.arrays |= inner.arrays
        self._seen = inner._seen

    def _walk(self, path: str, value: Any, depth: int) -> None:
        self._seen += 1
        if depth >= MAX_DEPTH or self._seen > MAX_ARRAYS:
            raise CorruptCheckpointError(
                f"{self._directory}: {path!r:.100}: objects of more than {MAX_DEPTH} levels or {MAX_ARRAYS:,} values"
            )
        if isinstance(value, Refused):
            raise _NotPlainError(value.why)
        if isinstance(value, dict | list | tuple):
            self._walk_container(path, value, depth)
            return
        array = self._array(value)
        record = record_value(path, value) if array is None else ArrayLeaf("numpy")
        if record is None:
            raise _NotPlainError(f"a {type(value).__name__} is no leaf")
        self.leaves[path] = record
        if array is not None:
            self.arrays[path] = array

    def _walk_container(self, path: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            self.containers[path] = "list" if isinstance(value, list) else "tuple"
        if not value:
            self.leaves[path] = EmptyLeaf()
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            name = join(path, key_text(key, path))
            if name in self.leaves:
                raise _NotPlainError(f"two keys of a mapping are {key!r}")
            self._walk(name, child, depth + 1)
