"""What a process of the benchmark of the tools does: loads of Orbax, imports, diffs, and what they are held against."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import host_memory
from benchmarks.memory_probe import Peak

MIB = 1 << 20
CHANGE = 1e-3


def make_orbax(path: str, arrays: int, array_bytes: int, interface: str) -> None:
    """Save arrays of random float32 by one of Orbax's interfaces, as it does by default."""
    state = _state(arrays, array_bytes, 0)
    if interface == "v1":
        from orbax.checkpoint import v1

        v1.save_pytree(path, state)
        return
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def make_pair(folder: str, arrays: int, array_bytes: int) -> None:
    """Save two of our steps, in which every array has changed a little."""
    import jaxckpt_train as jct

    for number, name in enumerate(("a", "b")):
        state = _state(arrays, array_bytes, 0)
        for array in state.values():
            array += np.float32(CHANGE * number)
        jct.save(f"{folder}/{name}", state)


def _state(arrays: int, array_bytes: int, seed: int) -> dict[str, np.ndarray]:
    """Random values, which nothing compresses well."""
    rng = np.random.default_rng(seed)
    state = {name: np.empty(shape, np.float32) for name, shape in _shapes(arrays, array_bytes).items()}
    for array in state.values():
        rng.standard_normal(out=array, dtype=np.float32)
    return state


def _shapes(arrays: int, array_bytes: int) -> dict[str, tuple[int, int]]:
    return {f"layer_{number:03d}": (array_bytes // 4096, 1024) for number in range(arrays)}


def _measured(call: Callable[[], object], before: Callable[[], object], nbytes: int) -> dict[str, Any]:
    """Seconds, and the most memory that it had beyond what there was before; modules are imported by then.

    Memory for this many bytes is prepared before, for all subjects alike: see `host_memory`.
    """
    before()
    host_memory.make_present(nbytes)
    with Peak() as peak:
        started = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - started
    del found
    return {"seconds": seconds, "peak_bytes": peak.extra, "private_bytes": peak.extra_private}


def load_by_orbax(path: str, warm: str, nbytes: int, interface: str) -> dict[str, Any]:
    """A load of Orbax's into JAX arrays on this host, to the end; `warm` is a small one that comes before."""
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    jax.devices()
    if interface == "v1":
        return _measured(lambda: jax.block_until_ready(v1.load_pytree(path)), lambda: v1.load_pytree(warm), nbytes)
    with ocp.StandardCheckpointer() as restorer:
        return _measured(lambda: jax.block_until_ready(restorer.restore(path)), lambda: restorer.restore(warm), nbytes)


def load_by_us(path: str, warm: str, nbytes: int, arrays: int, array_bytes: int) -> dict[str, Any]:
    """Our load of the same into JAX arrays on this host, until all are ready."""
    import jax

    import jaxckpt_train as jct

    jax.devices()
    target = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in _shapes(arrays, array_bytes).items()}
    return _measured(lambda: jax.block_until_ready(jct.load(path, target)), lambda: jct.load(warm), nbytes)


def command(arguments: list[str], warm: list[str], nbytes: int) -> dict[str, Any]:
    """A command of `jaxckpt` in this process, without its start; `warm` is a small one that comes before."""
    from jaxckpt_train.cli.main import app

    def run(arguments: list[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            app(arguments)

    return _measured(lambda: run(arguments), lambda: run(warm), nbytes)


def load_both(folder: str, warm: str, nbytes: int) -> dict[str, Any]:
    """Load both steps into NumPy arrays in turn, verified."""
    import jaxckpt_train as jct

    def both(folder: str) -> None:
        for name in ("a", "b"):
            jct.load(f"{folder}/{name}")

    return _measured(lambda: both(folder), lambda: both(warm), nbytes)


def read_both_verified(folder: str, warm: str, nbytes: int) -> dict[str, Any]:
    """Both of two steps read as `diff` reads them, piece by piece into memory that is used again, and verified."""
    from jaxckpt_train.inspection.diff import over_pieces, pieces_of
    from jaxckpt_train.inspection.runs import open_at
    from jaxckpt_train.store.backends.local import LocalBackend

    def both(folder: str) -> None:
        pair = [open_at(LocalBackend(), f"{folder}/{name}") for name in ("a", "b")]
        arrays = [opened.arrays() for opened in pair]
        wanted = (piece for name in arrays[0] for piece in pieces_of(name, [each[name] for each in arrays]))
        for _ in over_pieces(pair, wanted):
            pass

    return _measured(lambda: both(folder), lambda: both(warm), nbytes)


def read_both(folder: str, nbytes: int) -> dict[str, Any]:
    """The files of both, read by direct calls of 64 MiB into memory that is there already: what the disk gives."""
    from jaxckpt_train.store.buffers import aligned_buffer

    files = [str(path) for path in sorted(Path(folder).rglob("*.safetensors"))]
    buffer = aligned_buffer(64 * MIB)
    buffer[:] = 0
    return _measured(lambda: [_read(file, buffer) for file in files], lambda: None, nbytes)


def _read(path: str, buffer: np.ndarray) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        at = 0
        while found := os.preadv(fd, [buffer], at):
            at += found
    finally:
        os.close(fd)


def make_run(run: str, steps: int) -> None:
    """A run with many small steps, each with a metric."""
    import jaxckpt_train as jct

    with jct.StepManager(run, preservation_policy=jct.PreserveAll()) as manager:
        state = {"params": {"kernel": np.ones((64, 64), np.float32)}, "step": 0}
        for step in range(steps):
            manager.save(step, state | {"step": step}, metrics={"loss": 1.0 / (step + 1)})


def make_leaves(path: str, leaves: int) -> None:
    """A checkpoint of many small leaves."""
    import jaxckpt_train as jct

    jct.save(
        path,
        {
            f"layer_{n // 10:04d}": {f"w{k}": np.full(16, n + k, np.float32) for k in range(10)}
            for n in range(0, leaves, 10)
        },
    )
