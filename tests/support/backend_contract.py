"""The contract of every back end: the tests that `test_local.py` and `test_memory.py` inherit.

The tests read written files without the back end under test, with the two functions `raw` and `names`.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import Entry
from jaxckpt_train.store.buffers import aligned_buffer


def refused(code: int, message: str = "cannot ") -> Any:
    """Expect a StorageError with this errno and a path."""

    def fits(error: StorageError) -> bool:
        return error.errno == code and bool(error.filename)

    return pytest.raises(StorageError, match=message, check=fits)


class BackendContract:
    """Inherit, and define `backend`, `root`, `direct`, `raw` and `names`."""

    direct: Any = False
    can_clone = True

    @pytest.fixture
    def backend(self) -> Any:
        """The back end under test."""
        raise NotImplementedError

    @pytest.fixture
    def root(self) -> str:
        """An empty directory in it."""
        raise NotImplementedError

    def raw(self, backend: Any, path: str) -> bytes:
        """Return the bytes of a file, read without the back end."""
        raise NotImplementedError

    def names(self, backend: Any, path: str) -> list[str]:
        """Return the names in a directory, read without the back end."""
        raise NotImplementedError

    def put(self, backend: Any, path: str, data: bytes) -> None:
        sink = backend.create(path, direct=self.direct)
        if data:
            padded = -(-len(data) // sink.alignment) * sink.alignment
            buffer = aligned_buffer(padded)
            buffer[: len(data)] = np.frombuffer(data, np.uint8)
            sink.write_at(0, buffer)
        sink.finish(len(data), sync=True)

    def get(self, backend: Any, root: str, name: str) -> bytes:
        source = backend.open(root, name, direct=self.direct)
        buffer = aligned_buffer(max(1, -(-source.size // 4096) * 4096))
        source.read_into(0, buffer, source.size)
        source.close()
        return buffer[: source.size].tobytes()

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
    def test_file_holds_written_bytes_without_padding(self, backend: Any, root: str, size: int) -> None:
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        self.put(backend, f"{root}/a", data)
        assert self.raw(backend, f"{root}/a") == data
        assert self.get(backend, root, "a") == data

    def test_many_threads_write_windows_in_any_order(self, backend: Any, root: str) -> None:
        sink = backend.create(f"{root}/a", direct=self.direct)
        pieces = [aligned_buffer(4096) for _ in range(16)]
        for number, piece in enumerate(pieces):
            piece[:] = number

        def write(number: int) -> None:
            sink.write_at(number * 4096, pieces[number])
            pieces[number][:] = 255  # the caller may reuse its buffer at once

        threads = [threading.Thread(target=write, args=(number,)) for number in reversed(range(16))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sink.finish(16 * 4096 - 5, sync=False)
        expected = np.repeat(np.arange(16, dtype=np.uint8), 4096)[:-5].tobytes()
        assert self.raw(backend, f"{root}/a") == expected

    def test_clone_stays_when_its_source_goes(self, backend: Any, root: str) -> None:
        self.put(backend, f"{root}/a", b"x" * 5000)
        assert backend.clone(f"{root}/a", f"{root}/b", 5000) is self.can_clone
        if not self.can_clone:
            assert self.names(backend, root) == ["a"]
            return
        backend.remove(f"{root}/a")
        assert self.get(backend, root, "b") == b"x" * 5000
        assert self.names(backend, root) == ["b"]

    def test_clone_of_nothing_is_refused(self, backend: Any, root: str) -> None:
        assert not backend.clone(f"{root}/a", f"{root}/b", 5000)
        assert self.names(backend, root) == []

    def test_abandoning_is_never_an_error(self, backend: Any, root: str) -> None:
        sink = backend.create(f"{root}/a", direct=self.direct)
        sink.abandon()
        sink.abandon()
        finished = backend.create(f"{root}/b", direct=self.direct)
        finished.finish(0, sync=True)
        finished.abandon()
        assert self.raw(backend, f"{root}/b") == b""

    def test_create_refuses_existing_names_and_missing_folders(self, backend: Any, root: str) -> None:
        self.put(backend, f"{root}/a", b"old")
        backend.make_directory(f"{root}/d", parents=False, sync=False)
        for taken in ("a", "d"):
            with refused(errno.EEXIST, "cannot create the file"):
                backend.create(f"{root}/{taken}", direct=self.direct)
        with refused(errno.ENOENT):
            backend.create(f"{root}/missing/x", direct=self.direct)
        with refused(errno.ENOTDIR):
            backend.create(f"{root}/a/x", direct=self.direct)
        assert self.raw(backend, f"{root}/a") == b"old"

    def test_reads_fill_any_part(self, backend: Any, root: str) -> None:
        data = bytes(range(256)) * 100
        self.put(backend, f"{root}/a", data)
        source = backend.open(root, "a", direct=self.direct)
        assert source.size == len(data)
        for offset, needed in [(0, 10), (5, 4000), (4096, 4096), (len(data) - 3, 3), (24_576, 1024)]:
            buffer = np.zeros(needed, np.uint8)
            source.read_into(offset, buffer, needed)
            assert buffer.tobytes() == data[offset : offset + needed]
        more = np.zeros(4096, np.uint8)
        source.read_into(24_576, more, 1024)
        assert more[:1024].tobytes() == data[24_576:]
        source.close()
        source.close()

    def test_read_beyond_the_end_is_corruption(self, backend: Any, root: str) -> None:
        self.put(backend, f"{root}/a", b"x" * 100)
        source = backend.open(root, "a", direct=self.direct)
        for offset, needed in [(0, 101), (90, 11), (4096, 1)]:
            with pytest.raises(CorruptCheckpointError, match=rf"{root}/a: ends at byte \d+"):
                source.read_into(offset, aligned_buffer(4096), needed)
        source.close()

    def test_removed_file_stays_readable_while_open(self, backend: Any, root: str) -> None:
        self.put(backend, f"{root}/a", b"still here")
        source = backend.open(root, "a", direct=self.direct)
        backend.remove(f"{root}/a")
        buffer = aligned_buffer(4096)
        source.read_into(0, buffer, 10)
        source.close()
        assert buffer[:10].tobytes() == b"still here"
        assert self.names(backend, root) == []

    def test_open_refuses_all_but_files(self, backend: Any, root: str) -> None:
        backend.make_directory(f"{root}/d", parents=False, sync=False)
        self.put(backend, f"{root}/a", b"")
        for name, code in [("missing", errno.ENOENT), ("missing/x", errno.ENOENT), ("d", errno.EISDIR)]:
            with refused(code, "cannot open the file"):
                backend.open(root, name, direct=self.direct)
        with refused(errno.ENOTDIR):
            backend.open(root, "a/x", direct=self.direct)
        with refused(errno.ENOENT):
            backend.open(f"{root}/missing", "x", direct=self.direct)

    def test_open_finds_files_in_folders(self, backend: Any, root: str) -> None:
        backend.make_directory(f"{root}/d/e", parents=True, sync=True)
        self.put(backend, f"{root}/d/e/a", b"deep")
        assert self.get(backend, root, "d/e/a") == b"deep"

    def test_list_has_kinds_in_order(self, backend: Any, root: str) -> None:
        self.put(backend, f"{root}/b", b"12345")
        self.put(backend, f"{root}/.a", b"")
        backend.make_directory(f"{root}/c/inner", parents=True, sync=False)
        expected = [Entry(".a", "file"), Entry("b", "file"), Entry("c", "directory")]
        assert backend.list(root) == expected
        with refused(errno.ENOENT, "cannot list the directory"):
            backend.list(f"{root}/missing")
        with refused(errno.ENOTDIR):
            backend.list(f"{root}/b")

    def test_directories_are_made_with_and_without_parents(self, backend: Any, root: str) -> None:
        backend.make_directory(f"{root}/a/b/c", parents=True, sync=True)
        backend.make_directory(f"{root}/a/b/c", parents=True, sync=True)
        assert self.names(backend, f"{root}/a/b") == ["c"]
        with refused(errno.EEXIST):
            backend.make_directory(f"{root}/a", parents=False, sync=False)
        with refused(errno.ENOENT):
            backend.make_directory(f"{root}/x/y", parents=False, sync=False)
        self.put(backend, f"{root}/file", b"")
        for path in ("file", "file/x", "file/x/y"):
            with refused(errno.ENOTDIR, "cannot create the directory"):
                backend.make_directory(f"{root}/{path}", parents=True, sync=True)

    def test_remove_takes_files_trees_and_missing_names(self, backend: Any, root: str) -> None:
        backend.make_directory(f"{root}/a/b", parents=True, sync=False)
        self.put(backend, f"{root}/a/b/file", b"x")
        self.put(backend, f"{root}/ab", b"a name that begins with the same letter")
        backend.remove(f"{root}/a")
        assert self.names(backend, root) == ["ab"]
        backend.remove(f"{root}/ab")
        for nothing in ("ab", "missing/x", "a"):
            backend.remove(f"{root}/{nothing}")
        assert self.names(backend, root) == []

    def test_sync_takes_files_and_directories_that_exist(self, backend: Any, root: str) -> None:
        self.put(backend, f"{root}/a", b"x")
        backend.sync(f"{root}/a")
        backend.sync(root)
        with refused(errno.ENOENT, "cannot sync"):
            backend.sync(f"{root}/missing")

    def test_rename_moves_files_and_trees(self, backend: Any, root: str) -> None:
        backend.make_directory(f"{root}/a/b", parents=True, sync=False)
        self.put(backend, f"{root}/a/b/file", b"x")
        backend.rename(f"{root}/a", f"{root}/c")
        backend.rename(f"{root}/c/b/file", f"{root}/file")
        assert self.names(backend, root) == ["c", "file"]
        assert self.raw(backend, f"{root}/file") == b"x"

    def test_rename_never_replaces(self, backend: Any, root: str) -> None:
        for directory in ("d", "empty"):
            backend.make_directory(f"{root}/{directory}", parents=False, sync=False)
        self.put(backend, f"{root}/a", b"a")
        self.put(backend, f"{root}/b", b"b")
        for source, target in [("a", "b"), ("a", "empty"), ("d", "empty"), ("d", "a")]:
            with refused(errno.EEXIST, f"cannot rename to {root}/{target}"):
                backend.rename(f"{root}/{source}", f"{root}/{target}")
        with refused(errno.ENOENT):
            backend.rename(f"{root}/missing", f"{root}/x")
        with refused(errno.ENOENT):
            backend.rename(f"{root}/a", f"{root}/missing/x")
        assert self.names(backend, root) == ["a", "b", "d", "empty"]
        assert self.raw(backend, f"{root}/b") == b"b"

    def test_exchange_swaps_whole_trees(self, backend: Any, root: str) -> None:
        for name in ("one", "two"):
            backend.make_directory(f"{root}/{name}", parents=False, sync=False)
            self.put(backend, f"{root}/{name}/{name}", name.encode())
        backend.exchange(f"{root}/one", f"{root}/two", sync=True)
        assert self.names(backend, root) == ["one", "two"]
        assert self.names(backend, f"{root}/one") == ["two"]
        assert self.raw(backend, f"{root}/two/one") == b"one"

    def test_exchange_with_missing_name_changes_nothing(self, backend: Any, root: str) -> None:
        backend.make_directory(f"{root}/one", parents=False, sync=False)
        for first, second in [("one", "missing"), ("missing", "one")]:
            with refused(errno.ENOENT):
                backend.exchange(f"{root}/{first}", f"{root}/{second}", sync=True)
        assert self.names(backend, root) == ["one"]

    def test_one_of_many_writes_the_new_file(self, backend: Any, root: str) -> None:
        start = threading.Barrier(8)
        won: list[int] = []

        def race(number: int) -> None:
            start.wait()
            if backend.write_new(f"{root}/lock", b"%d" % number * 1000):
                won.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert self.raw(backend, f"{root}/lock") == b"%d" % won[0] * 1000
        assert self.names(backend, root) == ["lock"]
        with refused(errno.ENOENT):
            backend.write_new(f"{root}/missing/lock", b"")

    def test_append_adds_at_the_end(self, backend: Any, root: str) -> None:
        for line in (b"one\n", b"two\n", b""):
            backend.append(f"{root}/history", line)
        assert self.raw(backend, f"{root}/history") == b"one\ntwo\n"
        with refused(errno.ENOENT):
            backend.append(f"{root}/missing/history", b"x")

    def test_appends_of_many_threads_all_arrive(self, backend: Any, root: str) -> None:
        def add(number: int) -> None:
            for _ in range(20):
                backend.append(f"{root}/history", b"%d\n" % number)

        threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines = self.raw(backend, f"{root}/history").split()
        assert sorted(lines) == sorted([b"0", b"1", b"2", b"3"] * 20)

    def test_refresh_changes_time_of_newest_version(self, backend: Any, root: str) -> None:
        path = f"{root}/lock"
        first = backend.swap_record(path, b"one", None)
        self.backdate(backend, f"{path}/{self.names(backend, path)[0]}")
        before = backend.read_record(path)
        assert backend.read_record(path) == before
        backend.refresh_record(path, first)
        after = backend.read_record(path)
        assert (after.version, after.data) == (first, b"one")
        assert after.refreshed_ns != before.refreshed_ns
        backend.swap_record(path, b"two", first)
        before = backend.read_record(path)
        backend.refresh_record(path, first)  # replaced meanwhile
        backend.refresh_record(f"{root}/missing", 1)
        assert backend.read_record(path) == before
        assert self.names(backend, root) == ["lock"]

    def backdate(self, backend: Any, path: str) -> None:
        """Make a file at least three seconds old."""
        raise NotImplementedError

    def test_record_starts_empty_and_is_replaced(self, backend: Any, root: str) -> None:
        assert backend.read_record(f"{root}/record") is None
        first = backend.swap_record(f"{root}/record", b"one", None)
        assert backend.read_record(f"{root}/record").data == b"one"
        second = backend.swap_record(f"{root}/record", b"two", first)
        found = backend.read_record(f"{root}/record")
        assert (found.version, found.data, found.problem) == (second, b"two", None)
        assert second != first

    @pytest.mark.parametrize("seen", ["nothing", "an older version"])
    def test_stale_version_replaces_no_record(self, backend: Any, root: str, seen: str) -> None:
        versions = [None]
        for data in (b"one", b"two", b"three"):
            versions.append(backend.swap_record(f"{root}/record", data, versions[-1]))
        stale = versions[0] if seen == "nothing" else versions[1]
        assert backend.swap_record(f"{root}/record", b"late", stale) is None
        assert backend.read_record(f"{root}/record").data == b"three"
        assert backend.swap_record(f"{root}/record", b"four", versions[-1]) is not None

    def test_racing_changes_of_record_are_all_kept(self, backend: Any, root: str) -> None:
        path = f"{root}/record"
        first = backend.swap_record(path, b"", None)

        def add(word: bytes) -> None:
            while word not in (found := backend.read_record(path)).data:
                assert found.problem is None
                if found.version == first or found.data.endswith(b"."):  # else it is not written completely
                    backend.swap_record(path, found.data + word, found.version)

        def add_all(name: str) -> None:
            for number in range(15):
                add(f" {name}{number}.".encode())

        threads = [threading.Thread(target=add_all, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        words = backend.read_record(path).data.split()
        assert sorted(words) == sorted(f"{name}{number}.".encode() for name in "abc" for number in range(15))
