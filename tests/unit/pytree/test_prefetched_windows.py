"""Prefetched windows: the saved bytes, each block once, in order, and a close that does not wait."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CheckpointTimeoutError, CorruptCheckpointError
from jaxckpt_train.pytree import redistribution
from jaxckpt_train.pytree.redistribution import Prefetcher, ShardReader, Stream, assign_reads
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import reader, threads
from jaxckpt_train.store.boxes import Box
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import digest_function
from jaxckpt_train.store.read_plan import VIEW_ALIGNMENT
from tests.support.checkpoints import commit
from tests.support.strategies import tilings
from tests.support.strict_backend import BLOCK, StrictBackend, small_sizes

pytestmark = pytest.mark.timeout(120)

SETTINGS = StoreSettings(read_budget_bytes=1 << 20, io_threads=1)
EMPTY = 0xEE


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


@st.composite
def saves(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, list[Box]]]:
    found, boxes = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape = (draw(st.integers(1, 60)), draw(st.integers(1, 400)))
        found[f"x{number}"] = np.random.default_rng(number).integers(0, 1 << 16, shape, np.uint16)
        boxes[f"x{number}"] = draw(tilings(shape, 3))
    return found, boxes


def saved(backend: StrictBackend, arrays: Any, boxes: Any, processes: int) -> tuple[Committed, list[Stream]]:
    committed = commit(backend, "/a/b", arrays, StoreSettings(segment_bytes=20_000), boxes=boxes)
    return committed, assign_reads(committed.manifest.parts[0].arrays, processes, BLOCK, lambda _: range(processes))


def expected(committed: Committed, stream: Stream, arrays: dict[str, np.ndarray], size: int) -> np.ndarray:
    """Return the expected content of all windows, computed from the arrays; gaps between pieces stay EMPTY."""
    whole = np.full(size, EMPTY, np.uint8)
    for piece in stream.pieces:
        array = arrays[committed.manifest.parts[0].arrays[piece.wanted].name]
        data = array[(*(slice(*side) for side in piece.chunk.box), ...)].tobytes()[piece.start : piece.stop]
        whole[piece.at : piece.at + len(data)] = np.frombuffer(data, np.uint8)
    return whole


def feed_of(backend: StrictBackend, committed: Committed, stream: Stream) -> ShardReader:
    return ShardReader(backend, committed, committed.manifest.parts[0].arrays, stream, SETTINGS, None)


class Answered:
    """Counts finished reads; `wait` waits for the next one."""

    def __init__(self) -> None:
        self._count = threading.Semaphore(0)

    def __call__(self) -> None:
        self._count.release()

    def wait(self) -> None:
        assert self._count.acquire(timeout=60)


@given(saves(), st.integers(1, 3), st.integers(1, 150), st.integers(1, 4), st.integers(1, 4))
def test_windows_hold_saved_bytes_read_once(save: Any, processes: int, lines: int, threads: int, ahead_by: int) -> None:
    backend = StrictBackend()
    committed, streams = saved(backend, *save, processes)
    window = lines * VIEW_ALIGNMENT
    for stream in streams:
        size = -(-stream.end // window) * window
        right, by_fill = expected(committed, stream, save[0], size), np.full(size, EMPTY, np.uint8)
        filling = feed_of(backend, committed, stream)
        for start in range(0, size, window):
            filling.fill(by_fill[start : start + window], start, start + window)
        filling.close()
        verified = list[int]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "digest_function", functools.partial(counted, verified))
            found = read_ahead(feed_of(backend, committed, stream), right, window, threads, ahead_by)
        assert found.tobytes() == by_fill.tobytes() == right.tobytes()
        assert sum(verified) == stream.bytes
        assert len(verified) == sum(-(-(piece.stop - piece.start) // BLOCK) for piece in stream.pieces)
        assert backend.open_files == 0


def counted(verified: list[int], name: str) -> Any:
    digest = digest_function(name)

    def count(data: memoryview) -> str:
        verified.append(len(data))
        return digest(data)

    return count


def read_ahead(feed: ShardReader, right: np.ndarray, window: int, threads: int, ahead_by: int) -> np.ndarray:
    """Read all windows with `ahead_by` of them ordered in advance, and check each as soon as it is complete."""
    answered, found = Answered(), np.full(len(right), EMPTY, np.uint8)
    ahead, windows, ordered, complete = Prefetcher(feed, threads, answered), len(right) // window, 0, 0
    while complete < windows:
        while ordered < min(windows, complete + ahead_by):
            start, ordered = ordered * window, ordered + 1
            ahead.order(found[start : start + window], start, start + window)
        new = ahead.look()
        complete += new
        assert found[: complete * window].tobytes() == right[: complete * window].tobytes()
        assert complete <= ordered
        if not new and complete < windows:
            answered.wait()
    assert ahead.look() == 0
    ahead.close()
    return found


class Held:
    """The first direct reads wait until they are released."""

    def __init__(self, backend: StrictBackend, hold: int) -> None:
        self._lock, self._left = threading.Lock(), hold
        self.begun, self.go_on, self.reads = threading.Semaphore(0), threading.Event(), 0
        backend.before_read = self.before_read

    def before_read(self) -> None:
        with self._lock:
            self._left, is_held = self._left - 1, self._left > 0
            self.reads += 1
        self.begun.release()
        if is_held:
            assert self.go_on.wait(60)


def large(backend: StrictBackend) -> tuple[Committed, Stream, np.ndarray]:
    arrays = {f"x{n}": np.random.default_rng(n).integers(0, 256, 4 * BLOCK, np.uint8) for n in range(3)}
    committed, (stream,) = saved(backend, arrays, None, 1)
    assert len(committed.manifest.segments) > 1
    return committed, stream, expected(committed, stream, arrays, stream.end)


def test_window_is_complete_only_after_those_before_it() -> None:
    backend = StrictBackend()
    committed, stream, right = large(backend)
    held, answered, found = Held(backend, 1), Answered(), np.full(stream.end, EMPTY, np.uint8)
    ahead = Prefetcher(feed_of(backend, committed, stream), 2, answered)
    ahead.order(found[:BLOCK], 0, BLOCK)
    ahead.look()
    assert held.begun.acquire(timeout=60)  # otherwise the read of another window might be the held one
    for start in range(BLOCK, stream.end, BLOCK):
        ahead.order(found[start : start + BLOCK], start, start + BLOCK)
    ahead.look()
    for _ in range(11):
        answered.wait()
        assert ahead.look() == 0
    assert held.reads == 12
    assert found[BLOCK:].tobytes() == right[BLOCK:].tobytes()
    held.go_on.set()
    answered.wait()
    assert ahead.look() == 12
    assert found.tobytes() == right.tobytes()
    ahead.close()
    assert backend.open_files == 0


def test_closed_prefetcher_reads_and_changes_nothing() -> None:
    backend = StrictBackend()
    committed, stream, _ = large(backend)
    held, answered, found = Held(backend, 2), Answered(), np.full(stream.end, EMPTY, np.uint8)
    ahead = Prefetcher(feed_of(backend, committed, stream), 2, answered)
    ahead.order(found, 0, stream.end)
    ahead.look()
    for _ in range(2):
        assert held.begun.acquire(timeout=60)
    ahead.close()
    held.go_on.set()
    for _ in range(2):
        answered.wait()
    assert held.reads == 2
    assert np.all(found == EMPTY)
    assert backend.open_files == 0


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_read_error_is_raised_by_look(what: str) -> None:
    backend = StrictBackend()
    committed, stream, right = large(backend)
    path = f"/a/b/{committed.manifest.segments[0].file}"
    if what == "damaged":
        place = committed.manifest.parts[0].arrays[0].chunks[0].offset + 2 * BLOCK + 5
        backend._file(path, "damage").data[place] ^= 1
    else:
        backend.remove(path)
    answered, found = Answered(), np.full(stream.end, EMPTY, np.uint8)
    ahead = Prefetcher(feed_of(backend, committed, stream), 1, answered)
    with pytest.raises(CorruptCheckpointError, match="bytes .* of leaf 'x0'" if what == "damaged" else path):
        for start in range(0, stream.end, BLOCK):
            ahead.order(found[start : start + BLOCK], start, start + BLOCK)
            while not ahead.look():
                answered.wait()
    ahead.close()
    before = 2 * BLOCK if what == "damaged" else 0
    assert found[:before].tobytes() == right[:before].tobytes()
    assert np.all(found[before:] == EMPTY)
    assert backend.open_files == 0


def test_unresponsive_disk_times_out_and_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(redistribution, "POLL_S", 0.02)
    backend = StrictBackend()
    committed, stream, _ = large(backend)
    held, answered, found = Held(backend, 1), Answered(), np.full(stream.end, EMPTY, np.uint8)
    ahead = Prefetcher(feed_of(backend, committed, stream), 1, answered)
    ahead.order(found, 0, stream.end)
    began = time.monotonic()
    with pytest.raises(CheckpointTimeoutError, match=r"^/a/b: no progress for"):
        while time.monotonic() - began < 60:
            assert ahead.look() == 0
    assert time.monotonic() - began > 0.19
    ahead.close()
    assert time.monotonic() - began < 30
    held.go_on.set()
    answered.wait()
    assert held.reads == 1
    assert np.all(found == EMPTY)
    assert backend.open_files == 0
