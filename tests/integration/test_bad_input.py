"""Bad input: each kind raises its own error that says what to do, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.commands import refused
from tests.support.same_trees import assert_same

STATE = {"params": {"w": np.arange(5000.0), "b": np.ones(3)}, "step": 7}


NOT_ALLOWED = """
import os, sys
import jaxckpt_train as jct
reads = (jct.load, jct.metadata, jct.verify)
for read in reads:
    read(sys.argv[1] + "/c")  # imports all that is imported late
os.setuid(65534)
for read in reads:
    try:
        read(sys.argv[1])
    except jct.NotACheckpointError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that may not enter a directory")
def test_directory_next_to_unreadable_one_is_read(run_python: Any) -> None:
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        jct.save(f"{made}/c", {"w": 1})
        os.mkdir(f"{made}/lost+found", 0o700)
        done = run_python(NOT_ALLOWED, made, check=True)
        lines = done.stdout.splitlines()
        assert len(lines) == 3
        assert all(f"{made}: " in line and line.endswith(f"such as {made}/c") for line in lines)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with the given options, which only root can, and not in every container."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and the mount command, for a small or read-only file system")
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mount is not allowed here: {done.stderr.decode().strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


def read_only(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)


def test_read_only_disk_keeps_its_checkpoint(mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=3m")
    jct.save(disk / "c", STATE)
    read_only(disk)
    for save in (jct.save, jct.save_async):
        with pytest.raises(jct.StorageError, match="Read-only file system") as caught:
            save(disk / "new", STATE)
        assert caught.value.errno == 30
        assert str(disk) in str(caught.value)
        with pytest.raises(jct.StorageError, match="Read-only file system"):
            save(disk / "c", STATE, overwrite=True)
    assert_same(jct.load(disk / "c"), STATE)
    assert [entry.name for entry in disk.iterdir()] == ["c"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk_keeps_its_checkpoint(overwrite: bool, mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=3m")
    jct.save(disk / "c", STATE)
    large = {"w": np.ones(5 << 20, np.uint8)}
    pending = jct.save_async(disk / ("c" if overwrite else "new"), large, overwrite=overwrite)
    with pytest.raises(jct.StorageError, match="No space left on device") as caught:
        pending.wait()
    assert caught.value.errno == 28
    assert any("while saving" in note for note in caught.value.__notes__)
    assert_same(jct.load(disk / "c"), STATE)
    assert jct.verify(disk / "c").ok
    assert [entry.name for entry in disk.iterdir()] == ["c"]  # and the half of it is gone
    jct.save(disk / "small", STATE)


@pytest.mark.parametrize("leaves", [1, 100])
def test_full_disk_is_named_by_orbax_export(leaves: int, mounted: Callable[[str], Path], tmp_path: Path) -> None:
    disk = mounted("size=3m")
    values = np.random.default_rng(0).normal(size=(leaves, (20 << 20) // 8 // leaves))  # in one piece, or many small
    jct.save(tmp_path / "c", {f"v{number}": value for number, value in enumerate(values)})
    message = refused("export", tmp_path / "c", disk / "out", "--to", "orbax", code=4)
    assert "No space left on device" in message
    assert list(disk.iterdir()) == []


FULL_AT_EXIT = """
import sys, numpy as np, jaxckpt_train as jct
jct.save_async(sys.argv[1], {"w": np.ones(5 << 20, np.uint8)})
print("the end of the script")
"""


def test_full_disk_at_exit_fails_the_script(mounted: Callable[[str], Path], run_python: Any) -> None:
    disk = mounted("size=3m")
    done = run_python(FULL_AT_EXIT, disk / "c")
    assert done.returncode == 1
    assert done.stdout == "the end of the script\n"
    assert f"saving {disk / 'c'} failed" in done.stderr
    assert "No space left on device" in done.stderr
    assert list(disk.iterdir()) == []
