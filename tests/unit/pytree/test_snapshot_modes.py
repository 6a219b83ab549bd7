"""Snapshot modes: each saves the state at the call, and "stream" releases the caller when all is taken."""

from __future__ import annotations

import errno
import functools
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.pytree.snapshot import snapshot
from jaxckpt_train.settings import SnapshotMode
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.writer import SegmentWriter
from tests.support.fake_backends import HoldingBackend, RefusingBackend
from tests.support.same_trees import assert_same, raw

pytestmark = pytest.mark.timeout(60)

MODES = ("host", "device", "stream")
every_mode = pytest.mark.parametrize("mode", MODES)
BUSY = bytes(32 << 20)


def quick(mode: Any) -> jct.StoreSettings:
    return jct.StoreSettings(durability="none", snapshot=mode, staging_bytes=1 << 20)


class BusyBackend(LocalBackend):
    """Is busy before it makes a segment, while other threads run; accepts a limited number of writes."""

    def __init__(self, takes: int = 1 << 30) -> None:
        self.busy_s, self.takes = 0.0, takes

    def create(self, path: str, *, direct: Any) -> Any:
        started = time.perf_counter()
        if path.endswith(".safetensors"):
            hashlib.sha256(BUSY)
        self.busy_s += time.perf_counter() - started
        sink = super().create(path, direct=direct)
        inner = sink.write_at

        def write_at(offset: int, data: np.ndarray) -> None:
            self.takes -= 1
            if self.takes < 0:
                raise jct.StorageError(errno.ENOSPC, "cannot write: No space left on device", path)
            inner(offset, data)

        sink.write_at = write_at
        return sink


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def state_of(sharded: bool) -> dict[str, Any]:
    """Arrays of several kinds; the large one is several staging buffers."""
    state = {
        "w": jnp.arange(1 << 18, dtype=jnp.float32).reshape(256, 1024),
        "half": jnp.arange(512, dtype=jnp.bfloat16).reshape(32, 16),
        "n": jnp.int32(7),
        "weak": jnp.asarray(2.5) * 1,
        "none": jnp.zeros((0, 8)),
    }
    if sharded:
        specs = {"w": ("x", "y"), "half": ("y",), "n": (), "weak": (), "none": (None, "x")}
        at = {name: NamedSharding(mesh(), PartitionSpec(*spec)) for name, spec in specs.items()}
        state = {name: jax.device_put(leaf, at[name]) for name, leaf in state.items()}
    return {**state, "key": jax.random.key(5), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4)}


def step_of(leaf: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) + 1, impl=jax.random.key_impl(leaf))
    return leaf + 1


@functools.partial(jax.jit, donate_argnums=0)
def next_state(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(step_of, state)


def raw_of(tree: dict[str, Any]) -> dict[str, bytes]:
    return {name: raw(leaf) for name, leaf in tree.items()}


@every_mode
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "eight devices"])
def test_saved_state_is_that_of_the_call(mode: str, sharded: bool, tmp_path: Path) -> None:
    """The next step is given the memory of the state at once, and numpy arrays change in place."""
    state, host = next_state(state_of(sharded)), np.arange(5000.0)
    for number in range(20):
        expected = raw_of({**state, "host": host, "number": number})
        tree = {**state, "host": host, "number": number}
        pending = jct.save_async(tmp_path / "c", tree, overwrite=True, settings=quick(mode))
        old, state = state, next_state(state)
        host += 1
        assert old["w"].is_deleted() or mode == "stream", "JAX keeps an array of which a view is still being written"
        pending.wait()
        assert raw_of(jct.load(tmp_path / "c")) == expected


@every_mode
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "eight devices"])
def test_saved_state_comes_back_unchanged(mode: str, sharded: bool, tmp_path: Path) -> None:
    state = {**state_of(sharded), "host": np.arange(9.0), "text": "a", "number": 3}
    jct.save(tmp_path / "c", state, settings=quick(mode))
    assert_same(jct.load(tmp_path / "c", like=state), state)
    host = jct.StoreSettings(snapshot="auto", staging_bytes=1 << 20)
    jct.save(tmp_path / "auto", state, settings=host)
    names = sorted(path.name for path in (tmp_path / "c" / "state").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "auto" / "state").iterdir())
    for name in names:
        assert (tmp_path / "c/state" / name).read_bytes() == (tmp_path / "auto/state" / name).read_bytes()


@pytest.mark.parametrize("mode", ["auto", *MODES])
def test_arrays_may_be_deleted_once_the_call_returned(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the call returned, an array may be gone: it must have been fetched before."""
    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: BusyBackend())
    state = state_of(sharded=True)
    expected = raw_of(state)
    pending = jct.save_async(tmp_path / "c", state, settings=quick(mode))
    for leaf in state.values():
        leaf.delete()
    pending.wait()
    assert raw_of(jct.load(tmp_path / "c")) == expected


def test_only_stream_blocks_the_caller() -> None:
    state = state_of(sharded=True)
    for mode in ("auto", "host", "device"):
        assert snapshot(state, mode).is_taken.is_open()  # type: ignore[arg-type]
    taken = snapshot(state, "stream")
    for place in (chunk.data for array in taken.arrays for chunk in array.chunks if chunk.data.size):
        assert not taken.is_taken.is_open()
        place.fetch()  # type: ignore[union-attr]
    assert taken.is_taken.is_open()


@pytest.mark.parametrize("tree", [{}, {"a": None}, {"a": np.arange(3), "b": 5}])
def test_stream_saves_trees_without_device_arrays(tree: Any, tmp_path: Path) -> None:
    jct.save_async(tmp_path / "c", tree, settings=quick("stream")).wait()
    assert_same(jct.load(tmp_path / "c", like=tree), tree)


@pytest.mark.parametrize("mode", ["device", "stream"])
@pytest.mark.parametrize("takes", [0, 1, 3])
def test_full_disk_is_raised_by_wait(mode: str, takes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: BusyBackend(takes))
    pending = jct.save_async(tmp_path / "c", state_of(sharded=True), settings=quick(mode))
    with pytest.raises(jct.StorageError, match="No space left on device"):
        pending.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["first", "second"])
def test_failed_checkpointable_releases_all_checkpointables(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = RefusingBackend("create", f"{part}/p00000", errno.EACCES, 1)
    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: backend)
    parts = {"first": state_of(sharded=False), "second": state_of(sharded=True)}
    pending = jct.save_checkpointables_async(tmp_path / "c", parts, settings=quick("stream"))
    with pytest.raises(jct.StorageError, match="refused to create"):
        pending.wait()
    assert list(tmp_path.iterdir()) == []


def test_save_that_failed_holds_nothing_of_state(tmp_path: Path) -> None:
    taken = snapshot(state_of(sharded=True), "stream")
    assert taken.transfers is not None
    taken.close()
    assert taken.transfers._waiting == [None] * len(taken.transfers._waiting)
    assert taken.is_taken.is_open()


@pytest.mark.parametrize("value", ["gpu", "", "Stream", None, True, 1, ["host"]])
def test_unknown_snapshot_mode_is_refused(value: Any) -> None:
    with pytest.raises(jct.SettingsError, match=r"StoreSettings\.snapshot"):
        jct.StoreSettings(snapshot=value)


@every_mode
def test_steps_of_run_hold_state_at_their_call(mode: str, tmp_path: Path) -> None:
    state, expected = state_of(sharded=True), dict[int, dict[str, bytes]]()
    with jct.StepManager(tmp_path, settings=quick(mode)) as manager:
        for number in range(5):
            expected[number] = raw_of(state)
            manager.save(number, {"state": state})
            state = next_state(state)
        manager.wait()
        for number in range(5):
            assert raw_of(manager.restore(step=number)["state"]) == expected[number]


def release_later(backend: HoldingBackend, seconds: float) -> None:
    assert backend.reached.wait(60)
    backend.go.wait(seconds)
    backend.go.set()


@pytest.mark.parametrize(("mode", "waits"), [("device", False), ("stream", True)])
def test_history_records_how_long_loop_was_blocked(mode: str, waits: bool, tmp_path: Path) -> None:
    backend, held_s = HoldingBackend("create", "step-0000000001"), 0.2
    with jct.StepManager(tmp_path, settings=quick(mode), backend=backend) as manager:
        if waits:
            threading.Thread(target=release_later, args=(backend, held_s)).start()
        started = time.perf_counter()
        manager.save(1, {"state": {"a": jnp.arange(9)}})
        blocked_s = time.perf_counter() - started
        assert backend.go.is_set() is waits
        backend.go.set()
        manager.wait()
        *_, event = manager.history.events()
    assert event["step"] == 1
    assert event["blocked_s"] <= blocked_s
    assert event["blocked_s"] >= held_s or not waits


def test_arrays_leave_in_the_order_of_the_files() -> None:
    """Otherwise small arrays, which are written last, take the room of those that are written next."""
    sizes = [100, 8192, 64, 7, 4096, 640, 12288, 9]
    taken = snapshot({f"x{number}": jnp.zeros(size, jnp.uint8) for number, size in enumerate(sizes)}, "device")
    assert taken.transfers is not None
    order = [array.nbytes for array in taken.transfers._waiting if array is not None]
    assert order == [8192, 4096, 12288, 64, 640, 100, 7, 9]
    assert [array.shape for array in taken.arrays] == [(size,) for size in sizes]


def test_large_host_copies_are_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    in_place = SegmentWriter._in_place

    def note(self: SegmentWriter, *window: int) -> Any:
        seen.append(in_place(self, *window))
        return seen[-1]

    monkeypatch.setattr(SegmentWriter, "_in_place", note)
    state = {f"x{n}": jax.random.normal(jax.random.key(n), (1024, 4096)) for n in range(4)}
    modes: tuple[SnapshotMode, ...] = ("auto", "host")
    for mode in modes:
        seen.clear()
        jct.save(tmp_path / mode, state, settings=jct.StoreSettings(snapshot=mode))
        assert any(seen) is (mode == "host")
        assert jct.verify(tmp_path / mode).ok
        found = jct.load(tmp_path / mode)
        assert [found[name].tobytes() for name in state] == [np.asarray(array).tobytes() for array in state.values()]
