"""Prefetched windows: the memory they hold, and abandoned reads."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError, free_frames
from jaxckpt_train.pytree.redistribution import Prefetcher, ShardReader, assign_reads
from jaxckpt_train.pytree.shared_reads import JointRead
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import timeouts
from tests.support.checkpoints import commit
from tests.support.strict_backend import BLOCK, StrictBackend, small_sizes

pytestmark = pytest.mark.timeout(120)
SAVED = np.random.default_rng(0).integers(0, 256, 20 * BLOCK + 100, np.uint8)


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


class TransferBudget:
    """Reads the only array of a checkpoint ahead, on two threads."""

    def __init__(self, backend: StrictBackend) -> None:
        settings = StoreSettings(read_budget_bytes=1 << 20)
        committed = commit(backend, "/a/b", {"x": SAVED}, StoreSettings())
        records = committed.manifest.parts[0].arrays
        (self.stream,) = assign_reads(records, 1, BLOCK, lambda _: [0])
        self.read = queue.SimpleQueue[None]()
        feed = ShardReader(backend, committed, records, self.stream, settings, None)
        self.windows = Prefetcher(feed, 2, lambda: self.read.put(None))


@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.parametrize("size", [192, BLOCK, BLOCK + 64, 7 * BLOCK + 64])
def test_windows_become_complete_in_their_order(size: int, has_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_threads:
        monkeypatch.setattr(timeouts, "_is_started", lambda call: False)
    ahead, target = TransferBudget(StrictBackend()), np.zeros(len(SAVED) + size, np.uint8)
    starts = range(0, ahead.stream.end, size)
    with contextlib.closing(ahead.windows) as windows:
        for start in starts:
            windows.order(target[start : start + size], start, start + size)
        complete = 0
        while (complete := complete + windows.look()) < len(starts):
            end = min(complete * size, len(SAVED))
            assert np.array_equal(target[:end], SAVED[:end])
            ahead.read.get(timeout=60)
    assert np.array_equal(target[: len(SAVED)], SAVED)


def test_abandoned_read_is_counted_after_another_failed() -> None:
    backend, goes_on, answers_again = StrictBackend(), threading.Event(), threading.Event()
    ahead, turns = TransferBudget(backend), iter(range(2))

    def before_read() -> None:
        if next(turns) == 0:
            began.set()
            assert goes_on.wait(60)
            raise StorageError(5, "broken", "/a/b")
        began.set()
        assert answers_again.wait(60)

    backend.before_read = before_read
    before = timeouts._threads.get(None).abandoned_count()
    try:
        with contextlib.closing(ahead.windows) as windows:
            for number in range(2):
                began = threading.Event()
                windows.order(np.empty(BLOCK, np.uint8), number * BLOCK, (number + 1) * BLOCK)
                windows.look()
                assert began.wait(60)
            goes_on.set()
            ahead.read.get(timeout=60)
            with pytest.raises(StorageError, match="broken"):
                windows.look()
        assert timeouts._threads.get(None).abandoned_count() == before + 1
    finally:
        answers_again.set()


def test_error_of_a_window_does_not_keep_its_reader() -> None:
    class Reader:
        def fill(self, *window: Any) -> None:
            raise StorageError(5, "broken")

    committed: Any = SimpleNamespace(manifest=SimpleNamespace(block_bytes=BLOCK))
    job: Any = SimpleNamespace(exchange=lambda doing, act, merge, sign: act(), has_failed_elsewhere=lambda: False)
    windows: Any = SimpleNamespace(windows=1, window=lambda number: (0, BLOCK))
    reader: Any = Reader()
    kept = weakref.ref(reader)
    with pytest.raises(StorageError) as caught:
        JointRead(job, StrictBackend(), committed, "x", StoreSettings(), None, None)._move(windows, reader, print)
    free_frames(caught.value)
    del reader
    gc.collect()
    assert kept() is None
