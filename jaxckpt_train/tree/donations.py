"""Whether a loop donates the state that a save still holds: then a copy into kept memory is cheaper than a view."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import MutableSequence
from typing import Any

import jax
import numpy as np

from jaxckpt_train.settings import KIB, MIB
from jaxckpt_train.store.layout import ArraySource
from jaxckpt_train.tree.flatten import Flat

LEAST_BYTES = 32 * MIB
_PROBES, _PROBE_BYTES, _ARRAYS_LOOKED_AT = 4, 64 * KIB, 256
_KEPT_STRUCTURES = 4
_INCOMPARABLE = (TypeError, ValueError)  # static data in the tree that has no hash, or arrays in it

_donated: OrderedDict[Any, None] = OrderedDict()  # structures of trees (PyTreeDef), the latest last


class HeldViews:
    """Of one save: finds out whether the loop donates the JAX arrays on the CPU whose memory the save holds.

    JAX does not mark an array as donated whose memory is held: it copies it into memory that is new, which is slow. So
    a few small arrays are copied here instead of held, and tell of all when the save is over.
    """

    def __init__(self, flat: Flat, arrays: MutableSequence[ArraySource]) -> None:
        self._structure, self._arrays = flat.structure, arrays
        self._probes: list[jax.Array] = []
        for number, array in enumerate(itertools.islice(arrays, _ARRAYS_LOOKED_AT)):
            if len(self._probes) == _PROBES:
                break
            if len(array.chunks) != 1:
                continue
            chunk = array.chunks[0]
            leaf = flat.leaves[flat.names.index(array.name)] if 0 < chunk.data.nbytes <= _PROBE_BYTES else None
            is_here = isinstance(chunk.data, (np.ndarray, memoryview))
            if isinstance(leaf, jax.Array) and is_here:
                arrays[number] = array._replace(chunks=(chunk._replace(data=np.array(chunk.data, copy=True)),))
                self._probes.append(leaf)

    def end(self) -> None:
        """The save is over: if the loop donated what it held, remember that for the next save of such a tree."""
        probes, self._probes = self._probes, []
        if not any(probe.is_deleted() for probe in probes):
            return
        if sum(chunk.data.nbytes for array in self._arrays for chunk in array.chunks) < LEAST_BYTES:
            return
        with contextlib.suppress(*_INCOMPARABLE):
            _donated[self._structure] = None
            _donated.move_to_end(self._structure)
            while len(_donated) > _KEPT_STRUCTURES:
                _donated.popitem(last=False)


def is_donated(structure: Any) -> bool:
    """Whether a tree of this structure was donated while a save held it."""
    try:
        return structure in _donated
    except _INCOMPARABLE:
        return False
