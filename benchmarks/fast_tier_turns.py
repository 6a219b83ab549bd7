"""What each process of a job does in `benchmarks.fast_tier`. Each process is a host with a directory of its own."""

from __future__ import annotations

import time
from typing import Any, Literal

import jax
import numpy as np

import jaxckpt_train as jct
from benchmarks.process_figures import ResidentMeter
from jaxckpt_train.store.backends.base import Source
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.jobs.arrays import holds, sharding_of

MIB = 1 << 20
ARRAYS = 8


class SlowReads(LocalBackend):
    """A disk that all processes of the job share, which delivers a number of bytes per second in total."""

    def __init__(self, directory: str, bytes_per_s: float) -> None:
        self._directory, self._per_s = directory, bytes_per_s / jax.process_count()
        self._free_at = 0.0

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        """Open a file; its reads take their time if it is on the slow disk."""
        source = super().open(directory, name, direct=False if directory.startswith(self._directory) else direct)
        if directory.startswith(self._directory):
            read = source.read_into

            def slow(offset: int, data: np.ndarray, needed: int) -> None:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(data) / self._per_s
                read(offset, data, needed)
                time.sleep(max(0.0, self._free_at - time.monotonic()))

            source.read_into = slow  # type: ignore[method-assign]
        return source


def values_of(name: str, rows: int, step: int) -> np.ndarray:
    """Random values of an array, the same in every process."""
    return np.random.default_rng([step, int(name[1:])]).integers(0, 1 << 32, (rows, 1024), np.uint32)


def state_of(mib: int, step: int) -> dict[str, jax.Array]:
    """A state of this size, cut into rows over all processes."""
    rows, sharding = mib * 256 // ARRAYS, sharding_of([jax.device_count()], ["x"])
    return {
        name: jax.make_array_from_callback(
            (rows, 1024), sharding, lambda at, name=name: values_of(name, rows, step)[at]
        )
        for name in (f"a{number}" for number in range(ARRAYS))
    }


def manager_of(folder: str, redundancy: str, backend: LocalBackend | None = None) -> jct.StepManager:
    """The manager of a run with a fast tier."""
    host = f"host{jax.process_index()}"
    given: dict[str, Any] = {"redundancy": redundancy, "failure_domain": host, "interval_steps": 1}
    tier = jct.FastTierSettings(directory=f"{folder}/fast/{host}", **given)
    return jct.StepManager(f"{folder}/slow", fast_tier=tier, backend=backend)


def save(folder: str, redundancy: str, mib: int, saves: int) -> list[dict[str, float]]:
    """Save changing state to the fast tier; the times of the counted saves, and the memory that they take."""
    state, found = state_of(mib, 1), list[dict[str, float]]()
    changed = jax.jit(lambda state: jax.tree.map(lambda array: array * 3 + 1, state))
    with manager_of(folder, redundancy) as manager:
        for step in range(1, saves + 2):
            state = jax.block_until_ready(changed(state))
            manager.on_all("start together", lambda: None)
            if step == 2:
                meter = ResidentMeter()
            start = time.perf_counter()
            manager.save(step, {"state": state}, fast_only=True)
            blocked = time.perf_counter()
            manager.wait()
            ended = time.perf_counter()
            if step > 1:
                found.append({"blocked_s": blocked - start, "save_s": ended - start})
        memory = meter.read()
        found[-1]["memory_bytes"] = float(memory.peak - memory.before)
    return found


def keep(folder: str, mib: int) -> None:
    """Save a step to both tiers."""
    with manager_of(folder, "partner") as manager:
        manager.save(1, {"state": state_of(mib, 1)}, force=True)


def restore(folder: str, mib: int, mib_per_s: float) -> float:
    """Restore the newest step from the fast tier, or from a slow one of `mib_per_s` in total."""
    target, rows = state_of(mib, 0), mib * 256 // ARRAYS
    backend = SlowReads(f"{folder}/slow", mib_per_s * MIB)
    with manager_of(folder, "partner", backend) as manager:
        manager.on_all("meeting", lambda: None)
        start = time.perf_counter()
        found = manager.restore({"state": target})["state"]
        jax.block_until_ready(found)
        took_s = time.perf_counter() - start
    wrong = [name for name, array in found.items() if not holds(array, values_of(name, rows, 1))]
    assert not wrong, f"other bytes in {wrong}"
    return took_s
