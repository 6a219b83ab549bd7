"""What a fresh process measures for one size: a save and a load by the public calls, then their phases."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt_train
from benchmarks import cost_phases, host_memory, page_cache
from benchmarks.memory_probe import Peak

Answer = dict[str, Any]
Samples = dict[str, list[float]]

LEAVES_PER_LAYER = 100
LEAF_SHAPE = (4,)
COLUMNS = 64
LONG_S = 15.0


def leaves(size: int, path: str, repeats: int) -> Answer:
    """A tree of `size` arrays of 16 bytes."""
    contents = [np.full(LEAF_SHAPE, number, np.float32) for number in range(size)]
    arrays = jax.device_put(contents, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    tree: dict[str, dict[str, jax.Array]] = {}
    for number, array in enumerate(arrays):
        layer = tree.setdefault(f"layer_{number // LEAVES_PER_LAYER:04d}", {})
        layer[f"param_{number % LEAVES_PER_LAYER:02d}"] = array
    return _measure(tree, Path(path), repeats)


def one_array(size: int, path: str, repeats: int) -> Answer:
    """One array of `size` bytes, random."""
    content = np.random.Generator(np.random.SFC64(0)).bytes(size)
    array = jax.device_put(np.frombuffer(content, np.float32), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return _measure({"leaf": jax.block_until_ready(array)}, Path(path), repeats)


def shards(size: int, path: str, repeats: int) -> Answer:
    """One array of `size` chunks of 256 bytes, loaded as one piece, and over 8 devices that cut across every chunk."""
    tree = {"leaf": np.arange(size * COLUMNS, dtype=np.float32).reshape(size, COLUMNS)}
    across = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(None, "x"))
    where, samples = Path(path), _Samples()
    _warm_up(where)
    for _ in range(repeats):
        samples.add("save: ", cost_phases.save_in_phases(where, tree, chunks=size))
        samples.add("load: ", cost_phases.load_in_phases(where))
        samples.add("8 devices: ", cost_phases.load_in_phases(where, across))
        samples.time("load", lambda: jaxckpt_train.load(where))
        like = {"leaf": jax.ShapeDtypeStruct(tree["leaf"].shape, np.float32, sharding=across)}
        samples.time("load onto 8 devices", functools.partial(_load, where, like))
        stored = _stored(where)
        shutil.rmtree(where)
        if samples.long:
            break
    return {"seconds": samples.seconds, "bytes": {**stored, "data": tree["leaf"].nbytes}}


def manifest(size: int, path: str, repeats: int) -> Answer:
    """The manifest of `size` chunks, encoded and decoded."""
    made, samples = cost_phases.make_manifest(size), _Samples()
    for _ in range(repeats):
        data = samples.time("encode", functools.partial(cost_phases.encode, made))
        samples.time("decode", functools.partial(cost_phases.decode, data))
        if samples.long:
            break
    with Peak() as encoding:
        data = cost_phases.encode(made)
    with Peak() as decoding:
        held = cost_phases.decode(data)
    del held
    peaks = {"peak of encode": encoding.extra, "peak of decode": decoding.extra}
    return {"seconds": samples.seconds, "bytes": {"manifest": len(data), **peaks}}


class _Samples:
    """Seconds by phase, in the order in which the phases first came."""

    def __init__(self) -> None:
        self.seconds: Samples = {}
        self._began = time.perf_counter()

    @property
    def long(self) -> bool:
        """Whether it has taken long enough to leave it at what there is."""
        return time.perf_counter() - self._began > LONG_S

    def add(self, prefix: str, found: dict[str, float]) -> None:
        for name, seconds in found.items():
            self.seconds.setdefault(prefix + name, []).append(seconds)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result


def _measure(tree: Any, path: Path, repeats: int) -> Answer:
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
    samples = _Samples()
    data_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    _warm_up(path)
    for _ in range(repeats):
        page_cache.settle()
        host_memory.make_present(data_bytes)
        began = time.perf_counter()
        pending = samples.time("save_async returns", lambda: jaxckpt_train.save_async(path, tree))
        pending.wait()
        samples.add("", {"save": time.perf_counter() - began})
        host_memory.make_present(data_bytes)
        samples.time("load", functools.partial(_load, path, like))
        shutil.rmtree(path)
        samples.add("save: ", cost_phases.save_in_phases(path, tree))
        samples.add("load: ", cost_phases.load_in_phases(path))
        stored = _stored(path)
        shutil.rmtree(path)
        if samples.long:
            break
    return {"seconds": samples.seconds, "bytes": {**stored, "data": data_bytes, **_peaks(tree, like, path)}}


def _load(path: Path, like: Any) -> Any:
    return jax.block_until_ready(jaxckpt_train.load(path, like))


def _peaks(tree: Any, like: Any, path: Path) -> dict[str, int]:
    with Peak() as saving:
        jaxckpt_train.save(path, tree)
    with Peak() as loading:
        _load(path, like)
    shutil.rmtree(path)
    return {"peak of save": saving.extra, "peak of load": loading.extra}


def _warm_up(path: Path) -> None:
    """A save and a load of a few bytes: imports and threads."""
    jaxckpt_train.save(path, {"leaf": np.zeros(8)})
    jaxckpt_train.load(path)
    shutil.rmtree(path)


def _stored(path: Path) -> dict[str, int]:
    sizes = {file.relative_to(path): file.stat().st_size for file in page_cache.files_below(path)}
    return {"manifest": sizes[Path("manifest.json")], "all files": sum(sizes.values())}
