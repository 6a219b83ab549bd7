"""The local backend keeps the backend contract, with and without direct I/O, and follows no link."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends import local, local_names
from jaxckpt_train.store.backends.base import Entry
from jaxckpt_train.store.backends.local import LocalBackend, side_name
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.files import file_exists, is_file
from tests.support.backend_contract import BackendContract, refused
from tests.support.file_content import content


class TestBuffered(BackendContract):
    @pytest.fixture
    def backend(self) -> LocalBackend:
        return LocalBackend()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    def raw(self, backend: Any, path: str) -> bytes:
        return Path(path).read_bytes()

    def names(self, backend: Any, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def backdate(self, backend: Any, path: str) -> None:
        changed = os.stat(path).st_mtime - 60
        os.utime(path, (changed, changed))


class TestDirect(TestBuffered):
    direct: Any = "auto"


class TestWithoutLinks(TestBuffered):
    """A new file is renamed to its name, or created under it."""

    code, can_clone = errno.EPERM, False

    @pytest.fixture(autouse=True, params=[False, True], ids=["with rename flags", "without"])
    def _refuse(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        def link(*_: Any, **__: Any) -> None:
            raise OSError(self.code, os.strerror(self.code))

        monkeypatch.setattr(os, "link", link)
        if request.param:
            monkeypatch.setattr(local_names, "_renameat2", lambda *_: False)


class TestLinksNotSupported(TestWithoutLinks):
    code = errno.EOPNOTSUPP


@pytest.mark.parametrize("is_cut", [True, False])
def test_file_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool) -> None:
    """As on s3fs, which ignores the truncation of an open file."""
    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda file, size: truncate(file, size - 1) if is_cut else None)
    sink = LocalBackend().create(str(tmp_path / "a"), direct="auto")
    sink.write_at(0, aligned_buffer(4096))
    with refused(errno.EIO, "direct_io=False"):
        sink.finish(99, sync=False)


def takes_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


def test_direct_means_past_the_page_cache(tmp_path: Path) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system of the tests does not take O_DIRECT")
    backend = LocalBackend()
    sink = backend.create(str(tmp_path / "a"), direct=True)
    assert sink.alignment == 4096
    sink.write_at(0, aligned_buffer(4096))
    sink.finish(4096, sync=False)
    source = backend.open(str(tmp_path), "a", direct=True)
    assert source.alignment == 4096
    source.close()
    for opened in (backend.create(str(tmp_path / "b"), direct=False), backend.open(str(tmp_path), "a", direct=False)):
        assert opened.alignment == 1


@pytest.mark.parametrize("direct", [True, "auto"])
def test_direct_io_may_be_refused_midway(direct: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system of the tests does not take O_DIRECT")
    real_write, real_read = os.pwrite, os.preadv

    def is_direct(descriptor: int) -> bool:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def write(descriptor: int, data: Any, offset: int) -> int:
        if is_direct(descriptor) and offset:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data, offset)

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        if is_direct(descriptor) and offset:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, buffers, offset)

    data = aligned_buffer(8192)
    data[:] = 7
    sink = LocalBackend().create(str(tmp_path / "a"), direct=direct)
    sink.write_at(0, data[:4096])
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    if direct is True:
        with refused(errno.EOPNOTSUPP, "direct_io=True requires direct I/O"):
            sink.write_at(4096, data[4096:])
        sink.abandon()
        (tmp_path / "a").write_bytes(data)
    else:
        sink.write_at(4096, data[4096:])
        sink.finish(8192, sync=True)
    source, found = LocalBackend().open(str(tmp_path), "a", direct=direct), aligned_buffer(8192)
    source.read_into(0, found[:4096], 4096)
    if direct is True:
        with refused(errno.EOPNOTSUPP, "direct_io=True requires direct I/O"):
            source.read_into(4096, found[4096:], 4096)
    else:
        source.read_into(4096, found[4096:], 4096)
        assert found.tobytes() == bytes([7]) * 8192
    source.close()


def test_pieces_that_direct_io_refuses(tmp_path: Path) -> None:
    sink = LocalBackend().create(str(tmp_path / "a"), direct="auto")
    alignment, data = sink.alignment, aligned_buffer(6 * 4096)
    data[:] = np.random.default_rng(0).integers(0, 256, len(data), np.uint8)
    for start, stop in [(0, 4097), (4097, 8192), (8192, 16384), (16384, 20480), (20480, 24000)]:
        sink.write_at(start, data[start:stop])
    assert sink.alignment == alignment  # the other pieces still go past the page cache
    sink.finish(24000, sync=True)
    assert (tmp_path / "a").read_bytes() == data[:24000].tobytes()


def test_forgotten_file_leaves_the_page_cache(tmp_path: Path) -> None:
    backend, path = LocalBackend(), tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    backend.sync(str(path))
    if not is_cached(path):
        pytest.skip("the file system of the tests does not say what is in memory")
    backend.forget(str(path))
    if takes_direct(tmp_path):
        assert not is_cached(path)
    assert path.read_bytes() == bytes(1 << 20)
    backend.forget(str(tmp_path / "missing"))


def is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(4096)], 1 << 19, getattr(os, "RWF_NOWAIT", 0)) == 4096
        except OSError:
            return False


def test_unaligned_reads(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_001, np.uint8)
    (tmp_path / "a").write_bytes(data.tobytes())
    source = LocalBackend().open(str(tmp_path), "a", direct="auto")
    found = np.zeros(9000, np.uint8)
    source.read_into(7, found, 9000)
    source.close()
    assert found.tobytes() == data[7:9007].tobytes()


@pytest.mark.parametrize("where", ["file", "folder", "dangling"])
def test_links_below_the_directory_are_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"secret")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").symlink_to(tmp_path / "real" / ("a" if where == "file" else "missing"))
    (tmp_path / "here" / "d").symlink_to(tmp_path / "real")
    name, code = ("d/a", errno.ENOTDIR) if where == "folder" else ("a", errno.ELOOP)
    with refused(code, "cannot open the file"):
        LocalBackend().open(str(tmp_path / "here"), name, direct="auto")
    with refused(errno.ELOOP, "cannot sync"):
        LocalBackend().sync(str(tmp_path / "here" / "a"))
    assert [entry.kind for entry in LocalBackend().list(str(tmp_path / "here"))] == ["other", "other"]


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"x")
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    source = LocalBackend().open(str(tmp_path / "latest"), "a", direct=False)
    assert source.size == 1
    source.close()


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_non_regular_file_is_refused_at_once(tmp_path: Path, kind: str, direct: Any) -> None:
    path = tmp_path / "a"
    try:
        os.mknod(path, {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK, "device": stat.S_IFCHR}[kind] | 0o600, 0x0105)
    except PermissionError:
        pytest.skip("only root makes devices")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match=r"not a regular file|No such device"):
        LocalBackend().open(str(tmp_path), "a", direct=direct)
    assert len(os.listdir("/proc/self/fd")) == before
    assert LocalBackend().list(str(tmp_path)) == [Entry("a", "other")]


def test_link_is_removed_without_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalBackend().remove(str(tmp_path / "tree"))
    LocalBackend().remove(str(tmp_path / "link"))
    assert (tmp_path / "real" / "a").read_bytes() == b"x"
    assert sorted(os.listdir(tmp_path)) == ["real"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    backend, root = LocalBackend(), str(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    backend.make_directory(f"{root}/d/e", parents=True, sync=True)
    backend.create(f"{root}/d/a", direct="auto").finish(0, sync=True)
    backend.create(f"{root}/d/b", direct="auto").abandon()
    backend.open(root, "d/a", direct="auto").close()
    for name in ("d/missing", "missing/a", "d/e", "d/a/x"):
        with pytest.raises(StorageError, match="cannot open"):
            backend.open(root, name, direct="auto")
    backend.write_new(f"{root}/lock", b"x")
    backend.write_new(f"{root}/lock", b"x")
    backend.append(f"{root}/lock", b"x")
    backend.list(root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files_says_what_to_raise(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(tmp_path, os.O_RDONLY))
        with refused(errno.EMFILE, "too many open files: raise `ulimit -n`"):
            LocalBackend().create(str(tmp_path / "a"), direct=False)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_new_file_appears_whole(tmp_path: Path) -> None:
    """A concurrent reader never sees an empty or partly written lock."""
    backend, seen, stop = LocalBackend(), set(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("lock*"):
                seen.add(len(path.read_bytes()))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(100):
        assert backend.write_new(str(tmp_path / f"lock{number}"), b"x" * 100_000)
    stop.set()
    thread.join()
    assert seen <= {100_000}


def test_exchange_without_kernel_support_uses_side_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.store.backends.local_names._renameat2", lambda *_: False)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    stale = Path(side_name(str(tmp_path / "two")))
    (stale / "left by a crash").mkdir(parents=True)
    before = content(tmp_path)
    with refused(errno.EBUSY):  # it may hold files of other programs, so it is not removed
        LocalBackend().exchange(str(tmp_path / "one"), str(tmp_path / "two"), sync=True)
    assert content(tmp_path) == before
    shutil.rmtree(stale)
    LocalBackend().exchange(str(tmp_path / "one"), str(tmp_path / "two"), sync=True)
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]
    assert os.listdir(tmp_path / "one") == ["two"]
    assert os.listdir(tmp_path / "two") == ["one"]
    with refused(errno.EEXIST):
        LocalBackend().rename(str(tmp_path / "one"), str(tmp_path / "two"))
    LocalBackend().rename(str(tmp_path / "one"), str(tmp_path / "three"))
    assert os.listdir(tmp_path / "three") == ["two"]


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOENT])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_repeated_rename_counts_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: int) -> None:
    """A network file system repeats a rename when it lost the first reply."""
    rename = local_names._renameat2

    def made_again(source: str, target: str, flags: int) -> bool:
        rename(source, target, flags)
        raise OSError(code, os.strerror(code))

    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir() if kind == "directory" else source.write_text("mine")
    monkeypatch.setattr(local_names, "_renameat2", made_again)
    LocalBackend().rename(str(source), str(target))
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("done", [False, True])
def test_exchange_that_signal_interrupts_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    exchange, calls = local_names._renameat2, []

    def interrupted(first: str, second: str, flags: int) -> bool:
        calls.append(first)
        if done or len(calls) > 1:
            exchange(first, second, flags)
        if len(calls) == 1:
            raise InterruptedError(errno.EINTR, "by hand")
        return True

    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    monkeypatch.setattr(local_names, "_renameat2", interrupted)
    LocalBackend().exchange(str(one), str(two), sync=True)
    assert (one.read_text(), two.read_text()) == ("2", "1")


@pytest.mark.parametrize("has_gone", [False, True])
def test_file_of_another_process_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gone: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("mine")
    target.write_text("theirs")

    def gone(*_: object) -> bool:
        source.unlink()
        raise OSError(errno.EEXIST, "exists")

    if has_gone:
        monkeypatch.setattr(local_names, "_renameat2", gone)
    with refused(errno.EEXIST):
        LocalBackend().rename(str(source), str(target))
    assert target.read_text() == "theirs"
    assert source.exists() is not has_gone


def test_side_name_is_hidden_sibling() -> None:
    assert side_name("/runs/a") == "/runs/.a.aside"


def test_looking_for_files_follows_the_path(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    assert [is_file(LocalBackend(), str(tmp_path / name)) for name in ("a", "dangling", "")] == [True, False, False]
    assert [file_exists(LocalBackend(), str(tmp_path / name)) for name in ("a", "dangling", "", "x")] == [
        True,
        True,
        True,
        False,
    ]


def test_refused_direct_io_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no direct I/O")
    (tmp_path / "a").write_bytes(b"whole")
    open_file = os.open

    def refuse(path: str, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    backend = LocalBackend()
    for try_it in (
        lambda: backend.open(str(tmp_path), "a", direct=True),
        lambda: backend.create(str(tmp_path / "b"), direct=True),
    ):
        with pytest.raises(StorageError, match=r'requires direct I/O.*use direct_io="auto"') as caught:
            try_it()
        assert caught.value.errno == errno.EOPNOTSUPP
    assert not (tmp_path / "b").exists()
    backend.open(str(tmp_path), "a", direct="auto").close()


def test_a_source_that_is_lost_closes_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    before = sorted(os.listdir("/proc/self/fd"))
    LocalBackend().open(str(tmp_path), "a", direct=False)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_required_direct_io_fails_on_systems_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_O_DIRECT", 0)
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(StorageError, match="requires direct I/O"):
        LocalBackend().create(str(tmp_path / "b"), direct=True)
    with pytest.raises(StorageError, match="requires direct I/O"):
        LocalBackend().open(str(tmp_path), "a", direct=True)
    LocalBackend().create(str(tmp_path / "b"), direct="auto").finish(0, sync=False)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_parent_made_by_another_job_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears between the check for a directory and the check for any file."""
    name_exists = local.name_exists

    def meanwhile(path: str) -> bool:
        os.makedirs(path, exist_ok=True)
        return name_exists(path)

    monkeypatch.setattr(local, "name_exists", meanwhile)
    LocalBackend().make_directory(str(tmp_path / "runs" / "a" / "b"), parents=True, sync=True)
    assert (tmp_path / "runs" / "a" / "b").is_dir()


@pytest.fixture
def full_syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate macOS; record the size of each file synced to the medium, and -1 for each plain sync."""
    seen, real, fsync = list[int](), fcntl.fcntl, os.fsync

    def full(descriptor: int, command: int, *more: Any) -> Any:
        if command != 51:
            return real(descriptor, command, *more)
        seen.append(os.fstat(descriptor).st_size)
        return 0

    monkeypatch.setattr(local, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append(-1), fsync(descriptor))[1])
    return seen


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_files_and_names_reach_the_medium_on_macos(tmp_path: Path, full_syncs: list[int], size: int) -> None:
    backend, data = LocalBackend(), np.ones(size, np.uint8)
    sink = backend.create(str(tmp_path / "a"), direct=False)
    sink.write_at(0, data)
    sink.finish(size, sync=True)
    backend.sync(str(tmp_path / "a"))
    backend.write_new(str(tmp_path / "lock"), data.tobytes())
    assert full_syncs == [size] * 3
    backend.sync(str(tmp_path))
    assert len(full_syncs) == 4
    assert -1 not in full_syncs


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_file_system_without_full_sync_uses_fsync(
    tmp_path: Path, full_syncs: list[int], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    LocalBackend().sync(str(tmp_path))
    assert full_syncs == [-1]


def test_sync_that_failed_is_not_tried_another_way(
    tmp_path: Path, full_syncs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    with refused(errno.EIO, "cannot sync"):
        LocalBackend().sync(str(tmp_path))
    assert full_syncs == []
