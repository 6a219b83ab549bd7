"""The simulated disk makes the same calls as the local backend, in the same order."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends import local_names
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Backend
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.threads import Workers
from tests.nightly.crash.crash_disk import CrashDisk, Machine
from tests.nightly.crash.explorer import SETTINGS, small_sizes
from tests.nightly.crash.facts import state_of
from tests.nightly.crash.image import ROOT, Exchange, Image, Link, Operation, Rename, Sync, Unlink
from tests.nightly.crash.programs import process

MOST_CALLS = 30
ATTEMPT = re.compile(r"\.tmp-[0-9a-f]{8}-[0-9a-f]{8}-[0-9]+-[0-9]+-[0-9]+")
Call = tuple[Any, ...]
Scenario = Callable[[Backend, str], object]


class Trace:
    """Record the calls that change or sync files below a directory, and refuse one of them.

    Args:
        root: the directory.
        refuse_at: the number of the call to refuse; 0: none.
    """

    def __init__(self, root: str, refuse_at: int = 0) -> None:
        self._root, self._refuse_at, self.calls = root, refuse_at, list[Call]()

    def add(self, verb: str, *paths: str, more: Call = ()) -> bool:
        """Record a call; return whether it is to be refused."""
        if not all(path == self._root or path.startswith(f"{self._root}/") for path in paths):
            return False
        self.calls.append((verb, *(path.removeprefix(self._root) for path in paths), *more))
        return len(self.calls) == self._refuse_at

    def result(self) -> list[Call]:
        """Return all calls; random names are numbered, and consecutive removals are sorted."""
        numbers: dict[str, str] = {}
        named = [tuple(_without_chance(part, numbers) for part in call) for call in self.calls]
        result = list[Call]()
        for verb, group in itertools.groupby(named, key=lambda call: call[0]):
            calls = list(group)
            result += sorted(calls) if verb == "unlink" else calls
        return result


def _without_chance(part: Any, numbers: dict[str, str]) -> Any:
    if isinstance(part, str):
        part = ATTEMPT.sub(lambda match: numbers.setdefault(match[0], f".tmp-{len(numbers)}"), part)
    prefix = next((each for each in TEMPORARY_PREFIXES if isinstance(part, str) and f"/{each}" in part), None)
    return part if prefix is None else numbers.setdefault(part, f"{prefix}{len(numbers)}")


class TracedDisk(CrashDisk):
    """Record each call before it is made."""

    def __init__(self, trace: Trace, *, can_exchange: bool) -> None:
        super().__init__(Machine(can_exchange=can_exchange))
        self._trace = trace

    def do(self, operation: Operation, path: str) -> None:
        if self._trace.add(*_call_of(self.machine.live, operation)):
            self.refuse_in = 1
        super().do(operation, path)


def _call_of(image: Image, operation: Operation) -> tuple[str, ...]:
    paths = dict(_paths(image, ROOT, ""))
    match operation:
        case Link(folder, name, _, _) | Unlink(folder, name):
            return (type(operation).__name__.lower(), f"{paths[folder]}/{name}")
        case Rename():
            source, target = f"{paths[operation.source]}/{operation.name}", paths[operation.target]
            return ("rename", source, f"{target}/{operation.new_name}")
        case Exchange((first, name, _), (second, other, _)):
            return ("exchange", f"{paths[first]}/{name}", f"{paths[second]}/{other}")
        case _:
            return (type(operation).__name__.lower(), paths[operation.inode])


def _paths(image: Image, inode: int, path: str) -> Any:
    yield inode, path or "/"
    for name, found in image.folders.get(inode, {}).items():
        yield from _paths(image, found, f"{path}/{name}")


def trace_local(patch: pytest.MonkeyPatch, trace: Trace, *, can_exchange: bool) -> None:
    """Record the system calls of this process."""

    def refusing(name: str, describe: Callable[..., Call | None]) -> None:
        call = getattr(os, name)

        def traced(*args: Any, **options: Any) -> Any:
            found = describe(*args, **options)
            if found is not None and trace.add(*found):
                if name in ("write", "pwrite"):
                    call(args[0], args[1][: len(args[1]) // 2], *args[2:])
                raise OSError(errno.EIO, "refused")
            return call(*args, **options)

        patch.setattr(os, name, traced)

    exchange = local_names._renameat2

    def rename(source: str, target: str, flags: int) -> bool:
        if not can_exchange:
            return False
        verb = "exchange" if flags == local_names._RENAME_EXCHANGE else "rename"
        there = os.path.lexists(target) == (verb == "exchange")
        if there and trace.add(verb, source, target):
            raise OSError(errno.EIO, "refused")
        return exchange(source, target, flags)

    patch.setattr(local_names, "_renameat2", rename)
    refusing("mkdir", lambda path, *_, **__: None if os.path.lexists(path) else ("link", path))
    refusing("open", _call_of_open)
    refusing("link", lambda source, target: None if os.path.lexists(target) else ("link", target))
    refusing("rename", lambda source, target: ("rename", source, target))
    for name in ("unlink", "rmdir"):
        refusing(name, lambda path, *, dir_fd=None: ("unlink", path if dir_fd is None else f"{_path(dir_fd)}/{path}"))
    for name, verb in {"write": "write", "pwrite": "write", "ftruncate": "truncate"}.items():
        refusing(name, lambda file, *_, verb=verb: (verb, _path(file)))
    for name in ("fsync", "fdatasync"):
        refusing(name, lambda file: ("sync", _path(file)))


def _path(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _call_of_open(path: str, flags: int, *_: Any, dir_fd: int | None = None) -> Call | None:
    is_new = flags & os.O_CREAT and dir_fd is None and not os.path.lexists(path)
    return ("link", path) if is_new else None


def make_file(backend: Backend, path: str, *, sync: bool) -> None:
    sink = backend.create(path, direct=False)
    sink.write_at(0, np.arange(99, dtype=np.uint8))
    sink.finish(90, sync=sync)


def make_tree(backend: Backend, path: str) -> None:
    backend.make_directory(path, parents=False, sync=False)
    for name in "acb":
        make_file(backend, f"{path}/{name}", sync=True)
    backend.make_directory(f"{path}/d", parents=False, sync=False)
    make_file(backend, f"{path}/d/e", sync=False)


def directories(backend: Backend, root: str) -> None:
    for sync in (False, True, True, False):
        backend.make_directory(f"{root}/a/b/c", parents=True, sync=sync)
    backend.make_directory(f"{root}/a/b/d", parents=True, sync=True)


def records(backend: Backend, root: str) -> None:
    for _ in range(2):
        backend.write_new(f"{root}/lock", b"content")
        backend.append(f"{root}/lines", b"a line\n")
        backend.touch(f"{root}/lock")
        found = backend.read_record(f"{root}/record")
        version = backend.swap_record(f"{root}/record", b"content", None if found is None else found.version)
        backend.refresh_record(f"{root}/record", version or 0)
        if found is not None:
            backend.swap_record(f"{root}/record", b"late", found.version)
    backend.sync(f"{root}/lines")
    backend.remove(f"{root}/lock")
    backend.remove(f"{root}/lock")


def names(backend: Backend, root: str) -> None:
    make_tree(backend, f"{root}/one")
    backend.rename(f"{root}/one", f"{root}/two")
    with contextlib.suppress(FileNotFoundError):
        backend.rename(f"{root}/one", f"{root}/three")
    backend.sync(f"{root}/two/d")
    backend.sync(root)
    backend.remove(f"{root}/two")


def exchanged(backend: Backend, root: str, *, sync: bool, is_aside: bool = False) -> None:
    for name in ("one", "two", *([".two.aside"] if is_aside else [])):
        backend.make_directory(f"{root}/{name}", parents=False, sync=False)
    backend.exchange(f"{root}/one", f"{root}/two", sync=sync)


def synced_exchange(backend: Backend, root: str) -> None:
    exchanged(backend, root, sync=True)


def plain_exchange(backend: Backend, root: str) -> None:
    exchanged(backend, root, sync=False)


def exchange_after_a_crash(backend: Backend, root: str) -> None:
    exchanged(backend, root, sync=True, is_aside=True)


def whole_run(backend: Backend, root: str) -> None:
    with small_sizes(), process(1), pytest.MonkeyPatch.context() as patch:
        settings = StoreSettings(**SETTINGS, direct_io=False)
        patch.setattr(Workers, "_start_missing", lambda _: False)  # one thread makes the order deterministic
        with StepManager(f"{root}/run", settings=settings, preservation_policy=LatestN(2), backend=backend) as manager:
            for step, overwrite in ((1, False), (2, False), (2, True), (3, False), (4, False)):
                manager.save(step, state_of(step), overwrite=overwrite)
                manager.wait()
                manager._run._deleter.wait()
            manager.pin(3)
            manager.restore()


SCENARIOS = [directories, records, names, synced_exchange, plain_exchange, exchange_after_a_crash]


def calls_of_both(
    scenario: Scenario, folder: Path, *, can_exchange: bool, refuse_at: int = 0
) -> tuple[list[Call], list[Call]]:
    """Return the calls to the local file system, and those to the disk in memory."""
    root = folder / "data"
    root.mkdir(parents=True)
    real, model = Trace(str(root), refuse_at), Trace("/data", refuse_at)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StorageError):
        trace_local(patch, real, can_exchange=can_exchange)
        scenario(LocalBackend(), str(root))
    disk = TracedDisk(model, can_exchange=can_exchange)
    disk._make_one("/data")
    model.calls.clear()
    with contextlib.suppress(StorageError):
        scenario(disk, "/data")
    return real.result(), model.result()


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("scenario", [*SCENARIOS, whole_run])
def test_crash_disk_makes_the_same_calls(scenario: Scenario, tmp_path: Path, can_exchange: bool) -> None:
    real, model = calls_of_both(scenario, tmp_path, can_exchange=can_exchange)
    assert model == real
    assert len(real) > 2


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_calls_are_same_after_a_refused_one(scenario: Scenario, tmp_path: Path, can_exchange: bool) -> None:
    for refuse_at in range(1, MOST_CALLS):
        real, model = calls_of_both(scenario, tmp_path / str(refuse_at), can_exchange=can_exchange, refuse_at=refuse_at)
        assert model == real, f"call {refuse_at} was refused"


def test_recreated_directory_is_synced_again() -> None:
    disk = CrashDisk(Machine())
    for _ in range(2):
        disk.make_directory("/data/run", parents=True, sync=True)
        before = len(disk.machine.log)
        disk.make_directory("/data/run", parents=True, sync=True)
        assert len(disk.machine.log) == before
        disk.remove("/data/run")
    disk._make_one("/data/run")
    before = len(disk.machine.log)
    disk.make_directory("/data/run", parents=True, sync=True)
    assert [type(each) for each in disk.machine.log[before:]] == [Sync, Sync]
