"""Saves and runs on other kinds of file systems: overlayfs, exFAT, mergerfs."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.inspection.disk_speed import try_operations
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.faults.loop_disk import run_command, unmount
from tests.nightly.faults.needs import why_no_mount

pytestmark = pytest.mark.timeout(120)


def state_of(number: int) -> dict[str, np.ndarray]:
    return {"a": np.full(3, number), "b": np.random.default_rng(number).normal(size=200_001)}


def assert_same(found: dict[str, np.ndarray], number: int) -> None:
    for name, value in state_of(number).items():
        np.testing.assert_array_equal(found[name], value)


def save_steps(manager: jct.StepManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, {"state": state_of(step)})
        manager.wait()
        manager._run._deleter.wait()


def mounted(*command: str | os.PathLike[str], at: Path) -> Iterator[Path]:
    reason = why_no_mount()
    if reason is not None or shutil.which(command[0]) is None:
        pytest.skip(reason or f"needs {command[0]}")
    at.mkdir()
    try:
        run_command(*command)
    except OSError as error:
        pytest.skip(str(error))
    try:
        yield at
    finally:
        unmount(at)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """Mount an overlayfs whose lower layer holds checkpoints and a run with three steps."""
    lower, upper, work = (tmp_path / name for name in ("lower", "upper", "work"))
    for each in (lower, upper, work):
        each.mkdir()
    jct.save(lower / "params", state_of(0))
    (lower / "others").mkdir()
    jct.save(lower / "others" / "params", state_of(0))
    (lower / "others" / "params" / "notes.txt").write_text("of a user")
    with jct.StepManager(lower / "run") as manager:
        save_steps(manager, 1, 2, 3)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    yield from mounted("mount", "-t", "overlay", "overlay", "-o", options, tmp_path / "there", at=tmp_path / "there")


@pytest.fixture
def exfat(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    if why_no_mount() is not None or shutil.which("mkfs.exfat") is None:
        pytest.skip(why_no_mount() or "needs mkfs.exfat")
    run_command("mkfs.exfat", disk)
    try:
        loop = run_command("losetup", "-f", "--show", disk).strip()
    except OSError as error:
        pytest.skip(str(error))
    try:
        yield from mounted("mount.exfat-fuse", loop, tmp_path / "there", at=tmp_path / "there")
    finally:
        run_command("losetup", "-d", loop)


@pytest.fixture
def mergerfs(tmp_path: Path) -> Iterator[Path]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    branches = f"{tmp_path / 'one'}:{tmp_path / 'two'}"
    yield from mounted("mergerfs", branches, tmp_path / "there", at=tmp_path / "there")


def test_a_checkpoint_of_an_image_is_replaced(image: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        jct.save(image / "params", state_of(number), overwrite=True)
        assert_same(jct.load(image / "params"), number)
    assert sorted(os.listdir(image)) == ["others", "params", "run"]
    assert caplog.records == []


def test_checkpoint_of_image_with_other_files_stays(image: Path) -> None:
    with pytest.raises(jct.CheckpointExistsError, match=r"notes\.txt"):
        jct.save(image / "others" / "params", state_of(1), overwrite=True)
    assert_same(jct.load(image / "others" / "params"), 0)
    assert os.listdir(image / "others") == ["params"]


def test_steps_of_an_image_are_deleted(image: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager(image / "run", preservation_policy=jct.LatestN(2)) as manager:
        assert_same(manager.restore()["state"], 3)
        save_steps(manager, 4, 5, 6)
        assert manager.steps == [5, 6]
    assert sorted(name for name in os.listdir(image / "run") if "step" in name) == [
        "step-0000000005",
        "step-0000000006",
    ]
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_undeletable_step_of_image_is_warned_once(
    image: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LocalBackend, path: str) -> None:
        if path.endswith("/step-0000000001"):
            raise jct.StorageError(30, "cannot remove: Read-only file system", path)
        remove(self, path)

    remove = LocalBackend.remove
    with jct.StepManager(image / "run", preservation_policy=jct.LatestN(2)) as manager:
        manager.restore()
        monkeypatch.setattr(LocalBackend, "remove", refuse)
        save_steps(manager, 4, 5, 6, 7)
        warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(warned) == 1
        assert "step-0000000001" in warned[0].getMessage()
        assert (image / "run" / "step-0000000001").is_dir()
        assert manager.steps == [6, 7]
    assert jct.StepManager(image / "run").steps == [6, 7]


@pytest.mark.parametrize("kind", ["exfat", "mergerfs"])
def test_saves_and_runs_work(kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> None:
    root = request.getfixturevalue(kind)
    for number in range(3):
        jct.save(root / "one", state_of(number), overwrite=True)
        assert_same(jct.load(root / "one"), number)
    with jct.StepManager(root / "run", preservation_policy=jct.LatestN(2)) as manager:
        save_steps(manager, 1, 2, 3)
    with jct.StepManager(root / "run") as manager:
        assert_same(manager.restore()["state"], 3)
        assert manager.steps == [2, 3]
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    found = try_operations(LocalBackend(), str(root))
    assert not any(found.values())
