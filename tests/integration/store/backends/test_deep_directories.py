"""Deep directories, and directories that other processes or other users' permissions change, are removed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.forking import Tell, forked
from tests.support.killed_saves import OF_KILLED_SAVES, assert_holds, dead_attempt, names
from tests.support.overwritten import damage

pytestmark = OF_KILLED_SAVES
OLD, NEW = {"w": np.arange(4)}, {"w": np.arange(5)}
DEPTH = 300


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that `rm` removes after the test."""
    yield tmp_path / "place"
    subprocess.run(["rm", "-rf", str(tmp_path / "place")], check=True)


def make_deep(directory: Path, depth: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    here = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=here)
        above, here = here, os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(above)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize("depth", [1, 50, DEPTH])
def test_tree_of_any_depth_is_removed(place: Path, depth: int) -> None:
    make_deep(place / "tree", depth)
    make_deep(place / "tree" / "a" / "b", depth)
    (place / "tree" / "a" / "link").symlink_to(place)
    before = len(os.listdir("/proc/self/fd"))
    LocalBackend().remove(str(place / "tree"))
    assert names(place) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("depth", [1500, pytest.param(2500, marks=pytest.mark.nightly)])
def test_directories_that_are_too_deep_cost_only_a_warning(
    place: Path, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They are deeper than Python's call stack; only the first fit in a path."""
    make_deep(place / "tree", depth)
    (place / "tree" / "file").touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="too deep: remove them by hand"):
        LocalBackend().remove(str(place / "tree"))
    assert names(place / "tree") == ["a"]
    assert len(os.listdir("/proc/self/fd")) == before
    jct.save(place / "c", OLD)
    make_deep(dead_attempt(place / "c"), depth)
    jct.save(place / "c", NEW, overwrite=True)
    assert_holds(place / "c", NEW)
    assert "could not be removed" in caplog.text
    with jct.StepManager(place / "run", preservation_policy=jct.LatestN(1)) as manager:
        manager.save(1, {"state": OLD})
        manager.wait()
        make_deep(place / "run" / "step-0000000001" / "state", depth)
        manager.save(2, {"state": OLD})
    assert caplog.text.count("deleting .step-0000000001.tmp-") == 1


def test_removal_continues_after_concurrent_removal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        make_deep(place / "tree" / str(number), 2)
    real = os.unlink

    def unlink_after_the_other(name: str, *, dir_fd: int) -> None:
        real(name, dir_fd=dir_fd)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_after_the_other)
    LocalBackend().remove(str(place / "tree"))
    assert names(place) == []


@pytest.mark.parametrize("where", [dead_attempt, lambda checkpoint: checkpoint.with_name(".c.aside")])
def test_deep_leftover_does_not_stop_saves(place: Path, where: Callable[[Path], Path]) -> None:
    jct.save(place / "c", OLD)
    make_deep(where(place / "c"), DEPTH)
    for tree in (NEW, OLD):
        jct.save(place / "c", tree, overwrite=True)
        assert_holds(place / "c", tree)
    left = [] if where is dead_attempt else [".c.aside"]  # removed, or kept
    assert names(place) == sorted(["c", *left])


@pytest.mark.parametrize("is_damaged", [True, False])
@pytest.mark.parametrize("folder", [".", "state"])
def test_deep_tree_in_checkpoint_is_refused_or_kept(place: Path, folder: str, is_damaged: bool) -> None:
    jct.save(place / "c", OLD)
    make_deep(place / "c" / folder, DEPTH)
    if is_damaged:
        damage(place / "c")
    if is_damaged:  # a custom checkpointable may have written it
        jct.save(place / "c", NEW, overwrite=True)
        assert_holds(place / "c", NEW)
        assert (place / "c.replaced-1" / folder / "a").is_dir()
    else:
        with pytest.raises(jct.CheckpointExistsError, match="other files: "):
            jct.save(place / "c", NEW, overwrite=True)
        assert (place / "c" / folder / "a").is_dir()


def removed_by_unprivileged_user(tmp_path: Path) -> tuple[str | None, list[str]]:
    """Remove a tree as an unprivileged user, and return the name of the error and the remaining entries."""
    tmp_path.chmod(0o777)

    def remove(tell: Tell) -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            LocalBackend().remove(str(tmp_path / "tree"))
        except StorageError as error:
            tell("refused", errno.errorcode[error.errno or 0])
        tell("left", names(tmp_path))

    if os.getuid() == 0:
        subprocess.run(["chown", "-R", "65534:65534", str(tmp_path / "tree")], check=True)
        for parent in [*tmp_path.parents][:3]:
            parent.chmod(0o755)
    reported, status = forked(remove)
    assert status == 0
    return dict(reported).get("refused"), dict(reported)["left"]


def test_empty_read_only_directory_is_removed(tmp_path: Path) -> None:
    refused = tmp_path / "tree" / "refused"
    refused.mkdir(parents=True)
    refused.chmod(0o555)
    assert removed_by_unprivileged_user(tmp_path) == (None, [])


def test_non_empty_read_only_directory_is_refused(tmp_path: Path) -> None:
    refused = tmp_path / "tree" / "refused"
    refused.mkdir(parents=True)
    (refused / "file").touch()
    refused.chmod(0o555)
    assert removed_by_unprivileged_user(tmp_path) == ("EACCES", ["tree"])
    subprocess.run(["chmod", "-R", "u+w", str(tmp_path / "tree")], check=True)
