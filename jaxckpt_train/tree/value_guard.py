"""The value guard: which leaves of a state hold nan or inf, asked on the devices they lie on."""

from __future__ import annotations

import cmath
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt_train.store.dtypes import is_inexact
from jaxckpt_train.tree.caller_context import nothing_set
from jaxckpt_train.tree.pinned_host import is_on_host

NAN, INF = 2, 1
# So many arrays are looked at by one computation: a runtime takes only some tens of them before the first is done.
TOGETHER = 256


class ValueGuard:
    """What is wrong with the values of one tree, as it is now.

    Making one orders the looks at JAX arrays, some hundred by each computation, and looks at numpy arrays itself;
    `flaws` waits for the answers. The computations are compiled when a tree is first looked at. An inf in a single
    number is no flaw: the best loss of a run that has measured none is one.
    """

    def __init__(self, names: Sequence[str], leaves: Sequence[Any]) -> None:
        self.is_looking = False  # whether it waits for the devices, which may still be computing
        self._found: list[tuple[str, int, int]] = []
        self._asked: list[tuple[list[tuple[str, int]], jax.Array]] = []
        groups: dict[Any, list[tuple[str, jax.Array]]] = defaultdict(list)
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, jax.Array):
                if isinstance(leaf.dtype, np.dtype) and is_inexact(leaf.dtype) and leaf.size:  # else it holds keys
                    self._sort_in(name, leaf, groups)
            elif isinstance(leaf, (np.ndarray, np.generic)):
                if is_inexact(leaf.dtype):
                    self._found.append((name, leaf.ndim, _flaw_of(np.asarray(leaf))))
            elif isinstance(leaf, (float, complex)) and cmath.isnan(leaf):
                self._found.append((name, 0, NAN))
        for group in groups.values():
            for at in range(0, len(group), TOGETHER):
                some = group[at : at + TOGETHER]
                with nothing_set():
                    asked = _device_flaws(tuple(array for _, array in some))
                self._asked.append(([(name, array.ndim) for name, array in some], asked))

    def _sort_in(self, name: str, leaf: jax.Array, groups: dict[Any, list[tuple[str, jax.Array]]]) -> None:
        if not leaf.is_fully_addressable:  # each process looks at what it has, without the others
            for shard in {str(shard.index): shard.data for shard in leaf.addressable_shards}.values():
                if shard.size:
                    self._sort_in(name, shard, groups)
        elif is_on_host(leaf):  # offloaded: no device computes with it where it is
            self._found.append((name, leaf.ndim, _flaw_of(np.asarray(leaf))))
        else:
            groups[tuple(leaf.sharding.addressable_devices_indices_map(leaf.shape))].append((name, leaf))

    def flaws(self) -> list[tuple[str, str]]:
        """The leaf paths that hold what they should not, each with "nan" or "inf"."""
        found = list(self._found)
        self.is_looking = True
        try:
            with jax.transfer_guard_device_to_host("allow"):  # a few bytes; the user's guard is about the training
                for leaves, asked in self._asked:
                    answers = np.asarray(asked)
                    found += [(name, rank, int(flaw)) for (name, rank), flaw in zip(leaves, answers, strict=True)]
        finally:
            self.is_looking = False
        flaws = [
            (name, "nan" if flaw == NAN else "inf")
            for name, rank, flaw in found
            if flaw == NAN or (flaw == INF and rank > 0)
        ]
        return list(dict.fromkeys(flaws))


@jax.jit
def _device_flaws(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([_device_flaw(array) for array in arrays])


def _device_flaw(array: jax.Array) -> jax.Array:
    wide = array.astype(jnp.float32) if array.dtype.itemsize == 1 else array  # the smallest floats lack the questions
    return jnp.where(jnp.isnan(wide).any(), NAN, jnp.where(jnp.isinf(wide).any(), INF, 0)).astype(jnp.int8)


def _flaw_of(array: np.ndarray) -> int:
    wide = array.astype(np.float32) if array.dtype.itemsize == 1 else array
    if np.isnan(wide).any():
        return NAN
    return INF if np.isinf(wide).any() else 0
