"""Recognises leaves that are the very same JAX arrays as before, on devices whose memory nobody else can change.

On the CPU an array may share its memory with a NumPy array (`jax.device_put`, DLPack), which a program can change.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.backend import backends

from jaxckpt_train.errors import StorageError
from jaxckpt_train.pytree.copies import is_traced
from jaxckpt_train.pytree.flatten import is_key_array
from jaxckpt_train.store.reuse import WrittenBefore


class LeafIdentities:
    """The JAX arrays of a tree, by leaf path. It does not keep them alive."""

    def __init__(self, names: Sequence[str], leaves: Sequence[Any]) -> None:
        self._arrays: dict[str, weakref.ref[Any]] = {}
        if not has_own_memory():
            return
        examples = {type(leaf): leaf for leaf in leaves}
        kinds = {kind for kind, leaf in examples.items() if _never_changes(leaf)}
        arrays = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if type(leaf) in kinds]
        shared = {sharding for sharding in {leaf.sharding for _, leaf in arrays} if is_host_memory(sharding)}
        self._arrays = {name: weakref.ref(leaf) for name, leaf in arrays if leaf.sharding not in shared}

    def same(self, names: Sequence[str], leaves: Sequence[Any]) -> frozenset[str]:
        """The paths of those leaves that are the same arrays."""
        arrays, pairs = self._arrays, zip(names, leaves, strict=True)
        return frozenset(name for name, leaf in pairs if name in arrays and arrays[name]() is leaf)


def has_own_memory() -> bool:
    """Whether some device has a memory of its own."""
    return set(backends()) != {"cpu"}


def is_host_memory(sharding: Any) -> bool:
    """Whether arrays with this sharding are in the memory of the host."""
    return any(device.platform == "cpu" for device in sharding.device_set) or "host" in (sharding.memory_kind or "")


def _never_changes(leaf: Any) -> bool:
    """Whether it is an array of numbers; other subclasses, such as references, may change, and keys are small."""
    is_plain = isinstance(leaf, jax.Array) and type(leaf).__name__ == "ArrayImpl"
    return is_plain and not is_traced(leaf) and not is_key_array(leaf)


@dataclasses.dataclass(frozen=True)
class LastSaved:
    """One checkpointable as this process has last saved or restored it."""

    before: WrittenBefore
    identities: LeafIdentities


class UnreadArray:
    """A part of a JAX array that has been saved before, and is read only if that file is gone.

    It implements `store.segment.LazyArray`.
    """

    def __init__(self, name: str, held: jax.Array, inner: tuple[slice, ...] | None = None) -> None:
        self._name, self._held, self._inner = name, held, inner
        whole = held.shape
        lengths = whole if inner is None else tuple(len(range(n)[each]) for n, each in zip(whole, inner, strict=True))
        self.shape, self.dtype, self.size = lengths, np.dtype(held.dtype), math.prod(lengths)
        self.nbytes = self.size * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """The data. Raises StorageError: the array is gone, too."""
        if self._held.is_deleted():
            raise StorageError(
                errno.ENOENT,
                f"leaf {self._name!r} is unchanged, but the file with it is gone, and it was donated since",
            )
        with jax.transfer_guard_device_to_host("allow"):
            data = np.asarray(self._held)
        return data if self._inner is None else data[self._inner]
