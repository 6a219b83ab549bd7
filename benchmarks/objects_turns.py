"""What a process of the benchmark of object stores does: saves and loads, ours and obstore's, memory, and requests."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import obstore
from obstore.store import from_url

import jaxckpt_train as jct
from benchmarks import host_memory, memory_probe
from benchmarks.objects_arrays import ARRAYS, MIB, array_bytes, array_name, check, timed
from jaxckpt_train.settings import ObjectStoreSettings
from tests.support.objects.faults import Kind
from tests.support.objects.stand_in import StandIn

SMALL_ARRAYS, SMALL_BYTES = 1000, 2000
RAW, RUN = "raw", "run"
"""Below the bucket: the object that obstore alone puts, and our run."""

Answer = dict[str, Any]


def put_by_obstore(bucket: str, mib: int, is_quick: bool) -> Answer:
    """One object of random bytes, put by obstore in parts of our size, as many at once as ours."""
    store, settings, data = from_url(bucket), ObjectStoreSettings(), _all_bytes(mib)

    def put(key: str, content: np.ndarray) -> None:
        width, most = settings.part_bytes, settings.concurrency
        obstore.put(store, key, content, use_multipart=True, chunk_size=width, max_concurrency=most)

    put(f"{RAW}-first", data[:MIB])
    return {"seconds": timed(lambda: put(RAW, data), mib, is_quick)}


def get_by_obstore(bucket: str, mib: int, is_quick: bool) -> Answer:
    """The same object, got by obstore in ranges of our size, as many at once as ours, into new memory."""
    store, settings, size = from_url(bucket), ObjectStoreSettings(), mib * MIB
    width, starts = settings.part_bytes, range(0, size, settings.part_bytes)

    def get(start: int) -> obstore.Bytes:
        return obstore.get_range(store, RAW, start=start, end=min(start + width, size))

    found: list[obstore.Bytes] = []
    with concurrent.futures.ThreadPoolExecutor(settings.concurrency) as pool:
        list(pool.map(lambda start: obstore.get_range(store, RAW, start=start, length=1), starts))
        seconds = timed(lambda: found.extend(pool.map(get, starts)), mib, is_quick)
    data = _all_bytes(mib)
    for start, part in zip(starts, found, strict=True):
        check(bytes(part), data[start : start + width].tobytes())
    return {"seconds": seconds}


def save_by_us(bucket: str, mib: int, is_quick: bool) -> Answer:
    """A step of a run, saved until it is committed, and how long the call blocked; a small step comes before."""
    with jct.StepManager(bucket + RUN, preservation_policy=jct.PreserveAll()) as manager:
        manager.save(0, {"state": jax_state(1)})
        manager.wait()
        return _timed_save(manager, 1, jax_state(mib), lambda: host_memory.make_present(mib * MIB, is_quick=is_quick))


def load_by_us(bucket: str, mib: int, is_quick: bool) -> Answer:
    """The same step, loaded into JAX arrays by `jct.load`, from the opening of the run until all are ready."""
    return _timed_load(
        lambda target, step: jct.load_checkpointables(jct.StepManager(bucket + RUN).path(step), target), mib, is_quick
    )


def restore_by_us(bucket: str, mib: int, is_quick: bool) -> Answer:
    """As `load_by_us`, by `StepManager.restore`: into memory of XLA, so that the state can be donated."""

    def restore(target: Any, step: int) -> Any:
        with jct.StepManager(bucket + RUN) as manager:
            return manager.restore(target, step)

    return _timed_load(restore, mib, is_quick)


def _timed_load(load: Callable[[Any, int], Any], mib: int, is_quick: bool) -> Answer:
    load({"state": jax_target(1)}, 0)
    found: dict[str, Any] = {}
    target = {"state": jax_target(mib)}
    seconds = timed(lambda: found.update(jax.block_until_ready(load(target, 1))), mib, is_quick)
    for number in range(ARRAYS):
        check(np.asarray(found["state"][array_name(number)]).tobytes(), array_bytes(number, mib).tobytes())
    return {"seconds": seconds}


def peak_memory(bucket: str, mib: int, saves: bool) -> Answer:
    """The peak of a process's resident memory, from when its state is there; it saves, or does all but that."""
    state = jax_state(mib)
    with jct.StepManager(bucket + RUN) as manager:
        memory_probe.calm_down()
        memory_probe.reset_peak()
        if saves:
            manager.save(0, {"state": state})
            manager.wait()
        return {"peak_bytes": memory_probe.usage().peak}


def save_small(bucket: str) -> Answer:
    """A save of many small arrays, after another one."""
    with jct.StepManager(bucket + RUN, preservation_policy=jct.PreserveAll()) as manager:
        manager.save(0, {"state": _small_state(0)})
        manager.wait()
        return _timed_save(manager, 1, _small_state(1), lambda: None)


def count_small(times: int) -> list[list[Kind]]:
    """The kinds of the requests of each of some saves of many small arrays, after a first one."""
    found: list[list[Kind]] = []
    with StandIn() as server:
        os.environ.update(server.environment())
        with jct.StepManager(server.url(RUN), preservation_policy=jct.PreserveAll()) as manager:
            for step in range(times + 1):
                server.requests.clear()
                manager.save(step, {"state": _small_state(step)}, metrics={"loss": 1.0})
                manager.wait()
                found.append([request.kind for request in server.requests])
    return found[1:]


def count_resumes(steps: int, times: int) -> dict[str, list[list[Kind]]]:
    """The kinds of the requests of resumes from the newest of many steps: of a manager, and of a callback."""
    found: dict[str, list[list[Kind]]] = {"manager": [], "callback": []}
    with StandIn() as server:
        os.environ.update(server.environment())
        directory = server.url(RUN)
        with jct.StepManager(directory, preservation_policy=jct.PreserveAll()) as manager:
            for step in range(1, steps + 1):
                manager.save(step, {"state": {"w": np.full(64, step)}})
        for _ in range(times):
            server.requests.clear()
            with jct.StepManager(directory) as manager:
                restored = manager.restore({"state": {"w": np.zeros(64, int)}})
                found["manager"].append([request.kind for request in server.requests])
            check(bytes(restored["state"]["w"]), bytes(np.full(64, steps)))
            server.requests.clear()
            with jct.CheckpointCallback(directory, save_interval_steps=10, progress=False) as callback:
                callback.resume({"w": np.zeros(64, int)})
                found["callback"].append([request.kind for request in server.requests])
    return found


def _all_bytes(mib: int) -> np.ndarray:
    return np.concatenate([array_bytes(number, mib) for number in range(ARRAYS)])


def jax_state(mib: int) -> dict[str, jax.Array]:
    """The arrays on JAX's device."""
    return {array_name(number): jax.device_put(array_bytes(number, mib).view(np.uint32)) for number in range(ARRAYS)}


def jax_target(mib: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What to load them into."""
    shape, sharding = (mib * MIB // ARRAYS // 4,), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {array_name(number): jax.ShapeDtypeStruct(shape, np.uint32, sharding=sharding) for number in range(ARRAYS)}


def _small_state(step: int) -> dict[str, jax.Array]:
    """Arrays that all change from step to step."""
    return {
        f"w{number:04d}": jax.device_put(np.full(SMALL_BYTES // 4, number + step, np.float32))
        for number in range(SMALL_ARRAYS)
    }


def _timed_save(manager: jct.StepManager, step: int, state: Any, before: Callable[[], None]) -> Answer:
    """Seconds until the call returned, and until the step was committed."""
    jax.block_until_ready(state)
    gc.collect()
    before()
    started = time.perf_counter()
    manager.save(step, {"state": state})
    returned = time.perf_counter()
    manager.wait()
    return {"blocked_s": returned - started, "seconds": time.perf_counter() - started}
