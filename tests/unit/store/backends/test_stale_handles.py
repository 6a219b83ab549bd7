"""Files that another machine removes on a network file system: after ESTALE a name is looked up again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.store.backends.base import GONE
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import is_committed
from jaxckpt_train.store.files import read_or_none
from tests.support.runs import made_run, segment_of, state_of, step_of, step_path

Stale = Callable[..., "list[int]"]


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Stale:
    """Make a system call fail with ESTALE a number of times, for paths that end with a name."""

    def arm(call: str, name: str, times: int, then: Callable[[], object] = lambda: None) -> list[int]:
        real, left = getattr(os, call), [times]

        def stale_or_real(subject: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else os.fspath(subject)
            if (folder := kwargs.get("dir_fd")) is not None:
                path = f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}"
            if left[0] and path.endswith(name):
                left[0] -= 1
                then()
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return real(subject, *args, **kwargs)

        monkeypatch.setattr(os, call, stale_or_real)
        return left

    return arm


LOOKUPS: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "open a file": ("open", "COMMIT", lambda root: LocalBackend().open(f"{root}/s", "COMMIT", direct=False).close()),
    "open its directory": ("open", "/s", lambda root: LocalBackend().open(f"{root}/s", "COMMIT", direct=False).close()),
    "stat an open file": ("fstat", "COMMIT", lambda root: is_committed(LocalBackend(), f"{root}/s") or 1 / 0),
    "list": ("scandir", "/s", lambda root: LocalBackend().list(f"{root}/s")),
    "touch": ("utime", "COMMIT", lambda root: LocalBackend().touch(f"{root}/s/COMMIT")),
}
looks = pytest.mark.parametrize(("call", "name", "look"), list(LOOKUPS.values()), ids=list(LOOKUPS))


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "COMMIT").write_bytes(b"x")
    return str(tmp_path)


@looks
@pytest.mark.parametrize("times", [1, 2])
def test_name_that_is_stale_is_looked_up_anew(
    root: str, stale: Stale, call: str, name: str, look: Callable[[str], object], times: int
) -> None:
    left = stale(call, name, times)
    look(root)
    assert left == [0]


@pytest.mark.parametrize("call", ["open", "fstat"])
def test_a_file_that_stays_stale_is_gone(root: str, stale: Stale, call: str) -> None:
    stale(call, "COMMIT", 1000)
    with pytest.raises(StorageError) as refused:
        LocalBackend().open(f"{root}/s", "COMMIT", direct=False)
    assert refused.value.errno in GONE
    assert not is_committed(LocalBackend(), f"{root}/s")
    assert read_or_none(LocalBackend(), f"{root}/s", "COMMIT", 10) is None


@pytest.mark.parametrize(("call", "name"), [("lstat", "COMMIT"), ("unlink", "COMMIT")])
def test_stale_file_counts_as_removed(root: str, stale: Stale, call: str, name: str) -> None:
    stale(call, name, 1000)
    LocalBackend().remove(f"{root}/s/COMMIT")


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize(("call", "name"), [("open", "/step-0000000001"), ("scandir", "/state")])
def test_tree_that_another_machine_removes_meanwhile_is_removed(
    tmp_path: Path, stale: Stale, call: str, name: str, times: int
) -> None:
    run = made_run(tmp_path / "run", 1)
    left = stale(call, name, times)
    if (call, times) == ("scandir", 1000):  # its content is unknown, so it stays
        with pytest.raises(StorageError):
            LocalBackend().remove(str(step_path(run, 1)))
        return
    LocalBackend().remove(str(step_path(run, 1)))
    assert left[0] < times


REPLACED = ["COMMIT", "manifest.json", "state/p00000-s000.safetensors"]


@pytest.mark.parametrize("times", [1, 3, 6])
@pytest.mark.parametrize("file", REPLACED)
def test_reader_follows_replacement_of_stale_step(tmp_path: Path, stale: Stale, file: str, times: int) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    step_path(run, 2).rename(tmp_path / "later")

    def replaced() -> None:
        """The owner, on another machine, saves step 2 and deletes step 1."""
        if (tmp_path / "later").exists():
            (tmp_path / "later").rename(step_path(run, 2))
            step_path(run, 1).rename(tmp_path / "gone")

    with StepManager(run) as reader:
        assert reader.steps == [1]
        stale("open", f"{step_path(run, 1).name}/{file}", times, replaced)
        assert step_of(reader.restore({"state": state_of(0)})) == 2
    assert not reader.damaged


def test_stale_read_moves_on_to_the_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, an open file that another machine removes cannot be read."""
    run, real, armed = made_run(tmp_path / "run", 1, 2), os.preadv, [True]
    step_path(run, 2).rename(tmp_path / "later")

    def preadv(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        if armed[0] and os.readlink(f"/proc/self/fd/{descriptor}") == str(segment_of(step_path(run, 1))):
            armed[0] = False
            (tmp_path / "later").rename(step_path(run, 2))
            step_path(run, 1).rename(tmp_path / "gone")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with StepManager(run) as reader:
        assert step_of(reader.restore()) == 2
    assert not armed[0]


def test_run_directory_that_stays_stale_is_no_run(tmp_path: Path, stale: Stale) -> None:
    run = made_run(tmp_path / "run", 1)
    stale("scandir", "/run", 1000)
    assert StepManager(run).steps == []
    with pytest.raises(jct.NotACheckpointError):
        jct.load(run)
