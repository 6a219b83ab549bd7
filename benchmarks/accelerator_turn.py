"""What one process of `benchmarks.accelerator` does: raw limits, one library in a training, or a comparison."""

from __future__ import annotations

import functools
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import huge_memory, page_cache, raw_disk
from benchmarks.process_figures import ResidentMeter, release_memory
from benchmarks.step_time_model import Size, Training
from benchmarks.step_time_subjects import make_subject
from benchmarks.step_time_turn import WARM_STEPS, Cycle, run_cycle
from jaxckpt_train.settings import SnapshotMode

DIRECT_BYTES = 4096  # of which direct I/O takes multiples
MODES: tuple[SnapshotMode, ...] = ("auto", "host", "device", "stream")
# Of one byte and of half a byte, and those whose bytes an addition of zeros would change.
DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int8", "bool", "complex64")


def raw_limits(size: dict[str, int], directory: str, repeats: int) -> dict[str, Any]:
    """The same bytes by plain calls: copies between the device and pinned memory of the host, and the disk.

    Returns:
        The device that JAX uses here by default, bytes of the state, and a list of seconds for each of `to_host`,
        `to_device`, `write` and `read`.
    """
    training = Training(Size(**size))
    on_device = jax.tree.leaves(training.state)
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    back = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    to_host, to_device = [], []
    for _ in range(repeats + 1):  # the first one allocates
        began = time.perf_counter()
        on_host = jax.block_until_ready([jax.device_put(leaf, pinned) for leaf in on_device])
        copied = time.perf_counter()
        jax.block_until_ready([jax.device_put(leaf, back) for leaf in on_host])
        to_host.append(copied - began)
        to_device.append(time.perf_counter() - copied)
        del on_host
    writes, reads = _disk(Path(directory), training.nbytes, repeats)
    seconds = {"to_host": to_host[1:], "to_device": to_device[1:], "write": writes, "read": reads}
    first = jax.devices()[0]
    device = {"platform": first.platform, "kind": first.device_kind, "jax": jax.__version__}
    return {"device": device, "state_bytes": training.nbytes, "memory_kind": kind or "default", **seconds}


def turn(subject: str, size: dict[str, int], directory: str, saves: int, steps: int, limit_s: float) -> dict[str, Any]:
    """Saves while a training runs, then saves alone, and loads onto the device.

    Args:
        subject: name of the library.
        size: of the model.
        directory: where to save.
        saves: how many saves of each sort are counted; fewer if `limit_s` has passed.
        steps: of the training, before and during each save.
        limit_s: seconds after which no further save is begun; one of each sort is made in any case.
    """
    until = time.monotonic() + limit_s
    training, made, folder = Training(Size(**size)), make_subject(subject), Path(directory)
    # Committed, as what is loaded with a sharding is: else the first step after a load would compile anew.
    training.state = jax.device_put(training.state, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for _ in range(WARM_STEPS):
        training.step()
    device_before, meter = _peak_of_device(), ResidentMeter()
    cycles = list[Cycle]()
    for number in range(saves + 1):  # the first one does not count: it compiles, allocates and learns
        if number > 1 and time.monotonic() > until:
            break
        cycles.append(run_cycle(training, made, folder / f"during-{number}", steps, is_quick=True))
    alone = list[dict[str, float]]()
    for number in range(saves):
        if number > 0:
            if time.monotonic() > until:
                break
            shutil.rmtree(folder / f"alone-{number - 1}")
        alone.append(_save_alone(made, folder / f"alone-{number}", training))
    kept = folder / f"alone-{len(alone) - 1}"
    resident, device_after = meter.read(), _peak_of_device()
    like = jax.tree.map(_struct, training.state)
    loads = list[dict[str, float]]()
    for number in range(saves):
        if number > 0 and time.monotonic() > until:
            break
        training.state = None
        release_memory()
        page_cache.drop(kept)
        began = time.perf_counter()
        training.state = jax.block_until_ready(made.load(kept, like))
        loaded = time.perf_counter()
        stepped, ended = training.step()
        loads.append({"load_s": loaded - began, "first_step_s": ended - stepped})
    shutil.rmtree(kept)
    return {
        "state_bytes": training.nbytes,
        "quiet_s": [second for cycle in cycles[1:] for second in cycle.quiet_s],
        "during_s": [second for cycle in cycles[1:] for second in cycle.during_s],
        "blocking_s": [cycle.blocking_s for cycle in cycles[1:]],
        "save_s": [cycle.save_s for cycle in cycles[1:]],
        "alone": alone,
        "loads": loads,
        "host_peak_bytes": resident.peak - resident.before,
        "device_peak_bytes": None if device_after is None else device_after - (device_before or 0),
    }


def kept_bytes(directory: str, saves: int) -> dict[str, str]:
    """Save each sort of array in each mode, donate it right after the call, and compare what is loaded with a copy.

    Returns:
        What differs, by mode; empty: nothing.
    """
    return {mode: _difference(Path(directory), mode, saves) for mode in MODES}


def _difference(directory: Path, mode: SnapshotMode, saves: int) -> str:
    import jaxckpt_train

    settings = jaxckpt_train.StoreSettings(snapshot=mode)
    path = directory / f"kept-{mode}"
    for number in range(saves):
        tree = _every_sort(number)
        expected = jax.tree.map(_host_bytes, tree)
        like = jax.tree.map(_struct, tree)
        pending = jaxckpt_train.save_async(path, tree, overwrite=True, settings=settings)
        jax.block_until_ready(_overwritten(tree))
        del tree
        pending.wait(600.0)
        loaded = jaxckpt_train.load(path, like, settings=settings)
        for (name, want), found in zip(
            jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(loaded), strict=True
        ):
            if _host_bytes(found) != want:
                return f"save {number}: {jax.tree_util.keystr(name)} differs"
    shutil.rmtree(path)
    return ""


def _every_sort(number: int) -> dict[str, Any]:
    """Arrays with other values for each number; some lie on a mesh of one device, one is small, one has 8 MiB."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    over_one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    random = np.random.default_rng(number)
    tree: dict[str, Any] = {"key": jax.random.key(number), "keys": jax.random.split(jax.random.key(number), 8)}
    for name in DTYPES:
        dtype = jnp.dtype(name)
        values = random.integers(0, 2 if name == "bool" else 7, (256, 1024)).astype(dtype)
        tree[name] = jax.device_put(values, over_one)
        tree[f"one {name}"] = jnp.asarray(values[0, :1])
    return {**tree, "large": jnp.asarray(random.standard_normal(1 << 21, dtype=np.float32))}


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _overwritten(tree: Any) -> Any:
    """Zeros in the memory that held the tree; what holds that memory for the save must have let go, or have a copy."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf), tree
    )


def _host_bytes(leaf: jax.Array) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def _struct(leaf: jax.Array) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _save_alone(made: Any, path: Path, training: Training) -> dict[str, float]:
    """One save while nothing trains: seconds of the call, until it was finished, and until all of it was synced."""
    page_cache.settle()
    began = time.perf_counter()
    wait = made.start_save(path, training.state)
    returned = time.perf_counter()
    if wait is not None:
        wait()
    finished = time.perf_counter()
    if not made.durable:
        page_cache.sync_tree(path)
    durable = time.perf_counter()
    return {"call_s": returned - began, "finished_s": finished - began, "durable_s": durable - began}


def _peak_of_device() -> int | None:
    """The most bytes of device memory that were in use so far; None: the device does not say."""
    figures = jax.devices()[0].memory_stats()
    return None if figures is None else int(figures.get("peak_bytes_in_use", 0))


def _disk(directory: Path, nbytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds to write and sync a file of this size, and to read it without the page cache."""
    data = huge_memory.touched(-(-nbytes // DIRECT_BYTES) * DIRECT_BYTES)
    path, way, writes, reads = directory / "raw", raw_disk.WAYS[-1], list[float](), list[float]()
    for _ in range(repeats):
        writes.append(raw_disk.write_file(path, data, way, is_quick=True).wall_s)
        page_cache.drop(directory)
        reads.append(raw_disk.read_file(path, data, data.size, way, huge_memory.touched).wall_s)
        path.unlink()
    return writes, reads
