"""Loads keep temporary bytes within `read_budget_bytes`, and put arrays while others are still being read."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import checkpoint
from jaxckpt_train.pytree import placing
from jaxckpt_train.pytree._jax import enable_x64
from jaxckpt_train.pytree.placing import DevicePuts
from jaxckpt_train.store import buffers
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.watched_reads import Watch

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
LEAVES, LEAF_BYTES = 24, MIB
BUDGET = jct.StoreSettings(read_budget_bytes=4 * MIB, io_threads=1)


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(LEAF_BYTES // 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is larger than the budget."""
    path = tmp_path_factory.mktemp("run") / "c"
    jct.save(path, {f"x{n:02d}": content(n) for n in range(LEAVES)})
    return path


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def assert_loaded(found: dict[str, Any], dtype: Any) -> None:
    for number in range(LEAVES):
        array = np.asarray(found[f"x{number:02d}"])
        assert array.dtype == dtype
        assert array.tobytes() == content(number).astype(dtype).tobytes()


def test_bytes_converted_on_host_keep_read_budget(path: Path, watch: Watch) -> None:
    like = {f"x{n:02d}": np.empty(LEAF_BYTES // 8, np.float32) for n in range(LEAVES)}
    found = jct.load(path, like, cast=True, settings=BUDGET)
    assert_loaded(found, np.float32)
    result_bytes = sum(array.nbytes for array in found.values())
    assert watch.most <= result_bytes + BUDGET.read_budget_bytes + LEAF_BYTES


class SlowDevice(DevicePuts):
    """An accelerator: it copies what it is given, and holds that memory until it is released."""

    held: collections.deque[np.ndarray]

    def put(self, number: int, placement: Any, box: int, data: np.ndarray, **how: Any) -> Any:
        self.held.append(data)
        return super().put(number, placement, box, data.copy(), **how)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.deque[np.ndarray]]:
    """A CPU device in the role of one that is slower than the disk: it releases one array for each check."""
    held = SlowDevice.held = collections.deque()

    def release_one(generation: int) -> None:
        if held:
            held.popleft()

    monkeypatch.setattr(buffers, "gc", SimpleNamespace(collect=release_one))
    monkeypatch.setattr(buffers, "STALL_S", 0.001)
    monkeypatch.setattr(placing, "DevicePuts", SlowDevice)
    monkeypatch.setattr(placing.Placer, "leaves_host", lambda self, load: True)
    yield held
    held.clear()


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["as saved", "converted"])
def test_bytes_for_accelerator_keep_read_budget(
    path: Path, watch: Watch, accelerator: collections.deque[np.ndarray], dtype: Any
) -> None:
    like = {f"x{n:02d}": jax.ShapeDtypeStruct((LEAF_BYTES // 8,), dtype) for n in range(LEAVES)}
    with enable_x64(True):
        found = jct.load(path, like, cast=True, settings=BUDGET)
    assert_loaded(found, dtype)
    assert 2 * LEAF_BYTES < watch.most <= BUDGET.read_budget_bytes + 2 * LEAF_BYTES


class Gate(LocalBackend):
    """Reads of a file beyond some byte wait for the gate."""

    def __init__(self, beyond: int) -> None:
        self.beyond, self.gate, self.waited = beyond, threading.Event(), False

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        inner = source.read_into

        def read_into(offset: int, data: np.ndarray, needed: int) -> None:
            if offset > self.beyond:
                self.waited = True
                assert self.gate.wait(60), "nothing was put while the last bytes were being read"
            inner(offset, data, needed)

        source.read_into = read_into  # type: ignore[method-assign]
        return source


def test_arrays_are_put_while_others_are_being_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Gate(beyond=(LEAVES - 2) * LEAF_BYTES)

    class SignalledPuts(DevicePuts):
        def put(self, *given: Any, **how: Any) -> Any:
            backend.gate.set()
            return super().put(*given, **how)

    monkeypatch.setattr(checkpoint, "backend_for", lambda _: backend)
    monkeypatch.setattr(placing, "DevicePuts", SignalledPuts)
    with enable_x64(True):
        like = {f"x{n:02d}": jax.ShapeDtypeStruct((LEAF_BYTES // 8,), np.float64) for n in range(LEAVES)}
        assert_loaded(jct.load(path, like, settings=BUDGET), np.float64)
    assert backend.waited
