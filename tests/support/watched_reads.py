"""Leaves to read, and a count of the memory that the reader takes for them."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import buffers as staging
from jaxckpt_train.store import reader as reading
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import iter_boxes
from tests.support.checkpoints import commit
from tests.support.strict_backend import PAGE, StrictBackend

LEAF_PAGES = 16


class Watch:
    """Counts the living memory of the reader, without the reused buffers of its threads.

    It uses plain weak references, which die before the first finalizer reports free memory.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = self.largest = self.taken = 0
        self._alive: list[tuple[weakref.ref[np.ndarray], int]] = []
        self._lock = threading.Lock()
        self._make = staging.aligned_buffer
        for module in (reading, staging):
            patch.setattr(module, "aligned_buffer", self._aligned_buffer)

    @property
    def now(self) -> int:
        return sum(size for reference, size in list(self._alive) if reference() is not None)

    def _aligned_buffer(self, size: int) -> np.ndarray:
        array = self._make(size)
        if sys._getframe(1).f_code is inspect.unwrap(staging.BufferPool.borrow).__code__:
            return array
        with self._lock:
            self._alive.append((weakref.ref(array), size))
            self.taken += 1
            self.most, self.largest = max(self.most, self.now), max(self.largest, size)
        return array


def leaf(number: int, size: int = LEAF_PAGES * PAGE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def saved(backend: StrictBackend, count: int = 20, size: int = LEAF_PAGES * PAGE) -> tuple[Committed, list[Wanted]]:
    committed = commit(backend, "/runs/a", {f"x{n}": leaf(n, size) for n in range(count)}, StoreSettings())
    return committed, [Wanted(array, [full_box(array.shape)]) for array in committed.manifest.parts[0].arrays]


def passing(backend: Any, committed: Committed, wanted: Sequence[Wanted], chosen: StoreSettings) -> Any:
    return contextlib.closing(iter_boxes(backend, committed, marked(wanted, True), chosen))


def marked(wanted: Sequence[Wanted], passing: bool) -> list[Wanted]:
    return [want._replace(passing=passing) for want in wanted]
