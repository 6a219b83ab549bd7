"""Random bytes: the content of every leaf, the same for the same seed in every process and library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.leaf import Leaf
from benchmarks.workloads import Workload


def leaf_bytes(seed: Sequence[int], index: int, nbytes: int) -> np.ndarray:
    """`nbytes` bytes of leaf number `index`; every bit is random, so nothing can be compressed or found twice."""
    words = np.random.SFC64(np.random.SeedSequence((*seed, index))).random_raw(-(-nbytes // 8))
    return words.view(np.uint8)[:nbytes]


def each_leaf(workload: Workload, seed: Sequence[int], target: str | None = None) -> Iterator[tuple[Leaf, np.ndarray]]:
    """Every leaf, or every one that a load onto `target` returns, with its bytes."""
    wanted = set(workload.leaves if target is None else workload.wanted(target))
    for index, leaf in enumerate(workload.leaves):
        if leaf in wanted:
            yield leaf, leaf_bytes(seed, index, leaf.nbytes)
