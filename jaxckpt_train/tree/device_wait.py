"""Waits for arrays whose updates JAX has only queued so far, and says how long that took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax

# Of a larger tree some leaves are asked: asking 10,000 takes a tenth of the time of a snapshot. All outputs of one
# computation become ready together.
MOST_ASKED = 32
ASKING_S = 1e-3  # a wait that is shorter is the time of asking


def some_arrays(values: Sequence[Any]) -> list[jax.Array]:
    """The JAX arrays among `values`; of more than `MOST_ASKED` values, some of them."""
    step = -(-len(values) // MOST_ASKED) or 1
    return [value for value in values[::step] if isinstance(value, jax.Array) and not _is_traced(value)]


def device_wait_s(arrays: Sequence[jax.Array]) -> float:
    """Wait until these arrays are computed; those that are deleted are passed over.

    A loop that does not wait for its device runs ahead of it; JAX queues its updates. Waiting for them is training.

    Returns:
        Seconds that the devices needed; 0.0 if nothing was left to compute.
    """
    if not arrays:
        return 0.0
    started = time.perf_counter()
    # Who takes a deleted array, or the result of a computation that failed, raises an error that names it.
    with contextlib.suppress(RuntimeError):
        wait: Any = jax.block_until_ready
        wait(arrays)
    waited_s = time.perf_counter() - started
    return waited_s if waited_s > ASKING_S else 0.0


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)
