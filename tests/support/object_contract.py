"""The contract of `ObjectBackend` on any honest endpoint. Inherit, and define the fixture `reached`."""

from __future__ import annotations

import concurrent.futures
import errno
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError
from jaxckpt_train.settings import MIB, ObjectStoreSettings
from jaxckpt_train.store.backends.base import Entry
from jaxckpt_train.store.backends.objects import ObjectBackend
from tests.support.backend_contract import refused

PART_BYTES = 5 * MIB


class ObjectContract:
    """Inherit, and define `url`."""

    @pytest.fixture
    def url(self) -> str:
        """The URL of an empty prefix; the environment says how it is reached."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> ObjectBackend:
        return ObjectBackend(ObjectStoreSettings(part_bytes=PART_BYTES, retries=2))

    def put(self, backend: ObjectBackend, path: str, data: np.ndarray) -> None:
        sink = backend.create(path, direct=False)
        for at in range(0, len(data), 3 * MIB):
            sink.write_at(at, data[at : at + 3 * MIB])
        sink.finish(len(data), sync=True)

    def get(self, backend: ObjectBackend, url: str, name: str) -> bytes:
        source = backend.open(url, name, direct="auto")
        data = np.zeros(source.size, np.uint8)
        source.read_into(0, data, source.size)
        return data.tobytes()

    @pytest.mark.parametrize("size", [0, 1, 300_000, PART_BYTES, 2 * PART_BYTES + 7])
    def test_object_holds_written_bytes(self, backend: ObjectBackend, url: str, size: int) -> None:
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self.put(backend, f"{url}/a", data)
        assert self.get(backend, url, "a") == data.tobytes()

    def test_reads_fill_any_part_up_to_the_end(self, backend: ObjectBackend, url: str) -> None:
        data = np.random.default_rng(0).integers(0, 256, 600_000, np.uint8)
        self.put(backend, f"{url}/a", data)
        source = backend.open(url, "a", direct="auto")
        for offset, size in [(0, 10), (262_140, 20), (500_000, 100_000)]:
            found = np.zeros(size, np.uint8)
            source.read_into(offset, found, size)
            assert found.tobytes() == data[offset : offset + size].tobytes()
        with pytest.raises(CorruptCheckpointError):
            source.read_into(599_999, np.zeros(10, np.uint8), 2)

    def test_missing_objects_are_reported(self, backend: ObjectBackend, url: str) -> None:
        for call in (lambda: backend.open(url, "a", direct="auto"), lambda: backend.list(f"{url}/missing")):
            with refused(errno.ENOENT):
                call()
        assert backend.kind(f"{url}/a") is None
        assert backend.read_record(f"{url}/record") is None

    def test_clone_stays_when_its_source_goes(self, backend: ObjectBackend, url: str) -> None:
        data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
        self.put(backend, f"{url}/a", data)
        assert backend.clone(f"{url}/a", f"{url}/d/b", len(data))
        backend.remove(f"{url}/a")
        assert self.get(backend, f"{url}/d", "b") == data.tobytes()
        assert not backend.clone(f"{url}/a", f"{url}/c", len(data))

    def test_unfinished_object_does_not_appear(self, backend: ObjectBackend, url: str) -> None:
        sink = backend.create(f"{url}/a", direct=False)
        sink.write_at(0, np.zeros(PART_BYTES + 1, np.uint8))
        sink.abandon()
        assert backend.kind(f"{url}/a") is None

    def test_lists_objects_and_prefixes_and_removes_them(self, backend: ObjectBackend, url: str) -> None:
        for name in ("b", "a/x", "a/y/z", "ab"):
            backend.write_new(f"{url}/{name}", b"1")
        assert backend.list(url) == [Entry("a", "directory"), Entry("ab", "file"), Entry("b", "file")]
        assert [backend.kind(f"{url}/{name}") for name in ("a", "b")] == ["directory", "file"]
        backend.remove(f"{url}/a")
        backend.remove_objects([f"{url}/b", f"{url}/missing"])
        assert backend.list(url) == [Entry("ab", "file")]

    def test_one_of_many_creates_and_replaces(self, backend: ObjectBackend, url: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            new = list(pool.map(lambda n: backend.write_new(f"{url}/a", b"%d" % n), range(8)))
            first = self.get(backend, url, "a")
            changed = list(pool.map(lambda n: backend.replace(f"{url}/a", b"r%d" % n, first), range(8)))
        assert first == b"%d" % new.index(True)
        assert (new.count(True), changed.count(True)) == (1, 1)
        assert self.get(backend, url, "a") == b"r%d" % changed.index(True)

    def test_stale_version_replaces_no_record(self, backend: ObjectBackend, url: str) -> None:
        path = f"{url}/record"
        first = backend.swap_record(path, b"one", None)
        second = backend.swap_record(path, b"one", first)
        assert backend.swap_record(path, b"late", None) is None
        assert backend.swap_record(path, b"late", first) is None
        found: Any = backend.read_record(path)
        assert (found.version, found.data, found.problem) == (second, b"one", None)
        backend.refresh_record(path, found.version)
        refreshed: Any = backend.read_record(path)
        assert (refreshed.version, refreshed.data) == (second, b"one")
        assert refreshed.refreshed_ns != found.refreshed_ns

    def test_probe_accepts(self, backend: ObjectBackend, url: str) -> None:
        backend.probe(url)
        with pytest.raises(CheckpointError):
            backend.list(url)  # nothing is left
