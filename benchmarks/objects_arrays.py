"""The arrays that the benchmark of object stores saves, as bytes, and how it times a call."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np

from benchmarks import host_memory
from benchmarks.random_bytes import leaf_bytes

MIB = 1 << 20
ARRAYS = 16
SEED = (42,)


def array_name(number: int) -> str:
    """The key of an array in the state."""
    return f"layer_{number:02d}"


def array_bytes(number: int, mib: int) -> np.ndarray:
    """The bytes of an array of a state of this size."""
    return leaf_bytes(SEED, number, mib * MIB // ARRAYS)


def timed(call: Callable[[], object], mib: int, is_quick: bool) -> float:
    """Seconds of a call. Memory is prepared before, for all subjects alike: see `host_memory`."""
    gc.collect()
    host_memory.make_present(mib * MIB, is_quick=is_quick)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def check(found: bytes, expected: bytes) -> None:
    """Raises ValueError: other bytes were loaded."""
    if found != expected:
        raise ValueError("other bytes were loaded than saved")
