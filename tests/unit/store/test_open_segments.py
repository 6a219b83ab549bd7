"""The open segments of a load stay open while they are read, and belong to one checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import reader
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.committed import open_committed, use_committed
from jaxckpt_train.store.reader import Sources
from jaxckpt_train.store.timeouts import call_with_timeout
from tests.support.checkpoints import commit, load_committed
from tests.support.interrupts import interrupt_at
from tests.support.memory_backend import MemoryBackend
from tests.support.strict_backend import StrictBackend

pytestmark = pytest.mark.timeout(60)

UNVERIFIED = StoreSettings(verify_on_load=False, io_threads=1)
OLD = {name: np.full(5000, 1, np.uint8) for name in "ab"}
NEW = {name: np.full(5000, 2, np.uint8) for name in "ab"}


def test_segments_close_after_last_read() -> None:
    backend = StrictBackend()
    committed = commit(backend, "/runs/a", OLD, UNVERIFIED)
    opened = Sources(backend, committed, UNVERIFIED, [0, 0])
    opened.open()
    assert backend.open_files == 1
    reading, go = threading.Event(), threading.Event()

    def hold() -> None:
        reading.set()
        assert go.wait(30)

    backend.before_read = hold
    memory = aligned_buffer(4096)
    thread = threading.Thread(target=opened.read_into, args=(0, 0, memory, 4096))
    thread.start()
    assert reading.wait(30)
    assert opened.end() == []
    assert backend.open_files == 1, "a thread is reading it"
    go.set()
    thread.join()
    assert backend.open_files == 0
    with pytest.raises(StorageError, match="the load has ended"):
        opened.read_into(0, 0, memory, 4096)
    assert backend.open_files == 0


class Replacing(MemoryBackend):
    """Call `then` once, right before a segment is opened."""

    then: Callable[[], Any] | None = None
    after = 0

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if name.endswith(".safetensors") and self.then is not None:
            if self.after == 0:
                then, self.then = self.then, None
                then()
            self.after -= 1
        return super().open(directory, name, direct=direct)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("at_once", [1, 256])
def test_segments_of_two_checkpoints_are_never_mixed(after: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without verification: names and sizes are the same in both."""
    monkeypatch.setattr("jaxckpt_train.settings.check_fields", lambda subject, settings: None)  # allows small sizes
    monkeypatch.setattr(reader, "OPEN_AT_ONCE", at_once)
    chosen = StoreSettings(verify_on_load=False, io_threads=1, segment_bytes=5000)
    backend = Replacing()
    commit(backend, "/runs/a", OLD, chosen)
    old = open_committed(backend, "/runs/a")
    assert len(old.manifest.segments) == 2
    backend.after, backend.then = after, lambda: commit(backend, "/runs/a", NEW, chosen, replace=True)
    with pytest.raises(CorruptCheckpointError, match="was replaced"):
        load_committed(backend, old, chosen)
    backend.after, backend.then = after, lambda: commit(backend, "/runs/a", OLD, chosen, replace=True)
    found = use_committed(backend, "/runs/a", lambda committed: load_committed(backend, committed, chosen))
    assert {name: array.tobytes() for name, (array,) in found.items()} == {n: a.tobytes() for n, a in OLD.items()}


@pytest.mark.parametrize("verified", [True, False])
def test_vanished_checkpoint_is_read_if_verifiable(verified: bool) -> None:
    backend = Replacing()
    committed = commit(backend, "/runs/a", OLD, UNVERIFIED)
    backend.then = lambda: backend.remove("/runs/a/COMMIT")
    if not verified:
        with pytest.raises(NotACheckpointError, match=r"/runs/a: .* was removed"):
            load_committed(backend, committed, UNVERIFIED)
        return
    found = load_committed(backend, committed, StoreSettings())
    assert {name: array.tobytes() for name, (array,) in found.items()} == {n: a.tobytes() for n, a in OLD.items()}


def test_removed_checkpoint_is_not_reported_as_damaged() -> None:
    backend = Replacing()
    commit(backend, "/runs/a", OLD, UNVERIFIED)
    backend.then = lambda: backend.remove("/runs/a")
    with pytest.raises(NotACheckpointError, match=r"/runs/a: .* was removed") as caught:
        use_committed(backend, "/runs/a", lambda found: load_committed(backend, found, StoreSettings()))
    assert isinstance(caught.value.__cause__, CorruptCheckpointError)


def test_interrupted_opening_leaves_no_file_open() -> None:
    backend = StrictBackend()
    committed = commit(backend, "/runs/a", OLD, UNVERIFIED)
    for number in itertools.count(1):
        with interrupt_at(number, call_with_timeout) as seen, contextlib.suppress(KeyboardInterrupt):
            load_committed(backend, committed, UNVERIFIED)
        ends_s = time.monotonic() + 30
        while backend.open_files:  # a call that was abandoned goes on, and its file is closed at its end
            assert time.monotonic() < ends_s
        if seen[0] < number:
            break
    assert number > 5
