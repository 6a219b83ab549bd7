"""Arrays: what a worker needs of a library of arrays, to make a state and to check a loaded one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.leaf import Leaf
from benchmarks.random_bytes import each_leaf
from benchmarks.workloads import Workload

State = Any

PAGE_BYTES = 4096
MODULES = {"jax": "benchmarks.arrays_jax", "torch": "benchmarks.arrays_torch"}


class Arrays(Protocol):
    """One library. `State` is what its users pass to a checkpointer: nested dicts (JAX), or a flat dict (PyTorch)."""

    def make(self, workload: Workload, seed: Sequence[int]) -> State:
        """The state of the workload, with the bytes of `random_bytes`."""

    def like(self, workload: Workload, target: str) -> State:
        """What a load onto `target` has to return, without data."""

    def wait(self, loaded: State) -> None:
        """Wait until every array is there."""

    def found(self, loaded: State) -> dict[str, Any]:
        """The arrays of `loaded` by the names of their leaves."""

    def difference(self, array: Any, leaf: Leaf, workload: Workload, target: str) -> str | None:
        """How kind, shape, dtype or placement differ from what was asked for; None: not at all."""

    def pieces(self, array: Any, leaf: Leaf) -> Iterator[tuple[np.ndarray, tuple[slice, ...]]]:
        """The memory of an array as uint8, without a copy, and where each piece belongs: one for each device."""


def arrays_for(kind: str) -> Arrays:
    """The implementation for `jax` or `torch`, imported only now."""
    return importlib.import_module(MODULES[kind]).IMPLEMENTATION


def touch(arrays: Arrays, loaded: State, leaves: Sequence[Leaf]) -> int:
    """Read one byte of every page, so that bytes which were only promised so far are read now; `check` comes later."""
    found = arrays.found(loaded)
    there = [leaf for leaf in leaves if leaf.name in found]
    pages = (memory for leaf in there for memory, _ in arrays.pieces(found[leaf.name], leaf))
    return sum(int(memory.reshape(-1)[::PAGE_BYTES].max(initial=0)) for memory in pages)


def check(arrays: Arrays, loaded: State, workload: Workload, seed: Sequence[int], target: str) -> None:
    """Compare structure, types, placements and every byte on every device with what the seed says.

    Raises:
        ValueError: names the first leaf that differs, and how.
    """
    found = arrays.found(loaded)
    wanted = {leaf.name for leaf in workload.wanted(target)}
    if found.keys() != wanted:
        raise ValueError(f"missing leaves {sorted(wanted - found.keys())}, too many {sorted(found.keys() - wanted)}")
    for leaf, content in each_leaf(workload, seed, target):
        difference = arrays.difference(found[leaf.name], leaf, workload, target)
        difference = difference or _byte_difference(arrays, found[leaf.name], leaf, content)
        if difference:
            raise ValueError(f"leaf {leaf.name}: {difference}")


def _byte_difference(arrays: Arrays, array: Any, leaf: Leaf, content: np.ndarray) -> str | None:
    want = content.reshape(*leaf.shape, -1)  # the last dimension are the bytes of one item
    for memory, where in arrays.pieces(array, leaf):
        if not np.array_equal(memory, want[where]):
            return f"{np.count_nonzero(memory != want[where])} of {memory.size} bytes differ"
    return None
