"""A missing feature of a file system has a substitute, or `jaxckpt doctor` names it; no save is lost."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.inspection.disk_speed import try_operations
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends.base import is_removed_in_use
from jaxckpt_train.store.backends.local import LocalBackend
from tests.nightly.faults.fuse_disk import why_not
from tests.nightly.faults.poor_disk import FLAWS, poor_disk
from tests.support.commands import json_of
from tests.support.runs import talking_to

pytestmark = pytest.mark.timeout(120)
REASON = why_not()
SUBSTITUTED = ("no links", "no rename flags", "no direct I/O", "hides files in use")
OWNING = """
import os, sys
import numpy as np
import jaxckpt_train as jct
manager = jct.StepManager(sys.argv[1])
manager.save(1, {"state": {"a": np.full(3, 1)}})
manager.wait()
print("saved")
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _needs_a_mount() -> None:
    if REASON is not None:
        pytest.skip(f"cannot mount a file system in user space: {REASON}")


@contextlib.contextmanager
def poor(folder: Path, *flaws: str) -> Iterator[Path]:
    with poor_disk(folder, *flaws) as disk:
        yield disk.path


def state_of(number: int) -> dict[str, np.ndarray]:
    """Return two arrays whose sizes are no multiple of a block."""
    values = np.random.default_rng(number)
    return {"small": values.integers(0, 9, 3), "large": values.integers(0, 256, 700_001, np.uint8)}


def assert_same(found: dict[str, np.ndarray], number: int) -> None:
    for name, value in state_of(number).items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def steps_in(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name.startswith("step-"))


@pytest.mark.parametrize("flaws", [*((flaw,) for flaw in SUBSTITUTED), SUBSTITUTED, SUBSTITUTED[:2]])
def test_saves_overwrites_and_runs_work(tmp_path: Path, flaws: Sequence[str]) -> None:
    with poor(tmp_path, *flaws) as root:
        for number in range(3):
            jct.save(root / "one", state_of(number), overwrite=number > 0)
            assert_same(jct.load(root / "one"), number)
        with jct.StepManager(root / "run", preservation_policy=jct.LatestN(2)) as manager:
            for step in range(1, 5):
                manager.save(step, {"state": state_of(step)})
                manager.wait()
        with jct.StepManager(root / "run") as manager:
            assert_same(manager.restore()["state"], 4)
        assert len(steps_in(root / "run")) == 2
        assert [name for name in os.listdir(root / "run") if name.startswith(".")] == [LOCK_NAME]
        assert os.listdir(root) == ["one", "run"]


@pytest.mark.parametrize("flaws", [("no links",), ("no links", "no rename flags")])
def test_one_process_owns_run_without_links(tmp_path: Path, flaws: Sequence[str]) -> None:
    with poor(tmp_path, *flaws) as root:
        with talking_to(OWNING, root / "run") as owner:
            assert owner.read() == "saved"
            with pytest.raises(jct.DirectoryLockedError, match=f"process {owner.process.pid} "):
                jct.StepManager(root / "run").own()
        with jct.StepManager(root / "run") as manager:  # the owner is dead
            manager.own()
            assert manager.steps == [1]


@pytest.mark.parametrize("content", [b"", b'{"process":{"host":'])
def test_half_written_lock_is_taken_over(tmp_path: Path, content: bytes) -> None:
    with poor(tmp_path, "no links", "no rename flags") as root:
        (root / "run" / LOCK_NAME).mkdir(parents=True)
        (root / "run" / LOCK_NAME / "0000000001.json").write_bytes(content)
        with jct.StepManager(root / "run") as manager:
            manager.save(1, {"state": state_of(1)})
            manager.wait()
            assert_same(manager.restore()["state"], 1)


def test_untruncatable_files_need_buffered_writes(tmp_path: Path) -> None:
    with poor(tmp_path, "no cuts") as root:
        with pytest.raises(jct.StorageError, match="direct_io=False"):
            jct.save(root / "one", state_of(0))
        jct.save(root / "one", state_of(0), settings=jct.StoreSettings(direct_io=False))
        assert_same(jct.load(root / "one"), 0)


def test_files_open_in_a_reader_are_removed_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with poor(tmp_path, "hides files in use") as root:
        run, policy = root / "run", jct.LatestN(1)
        with jct.StepManager(run, preservation_policy=policy) as manager:
            manager.save(1, {"state": state_of(1)})
            manager.wait()
            with (run / "step-0000000001" / "COMMIT").open("rb") as reader:
                for step in (2, 3, 4):
                    manager.save(step, {"state": state_of(step)})
                    manager.wait()
                    manager._run._deleter.wait()
                assert steps_in(run) == ["step-0000000004"]
                (left,) = run.glob(".step-*")
                assert [is_removed_in_use(name) for name in os.listdir(left)] == [True]
                assert reader.read().startswith(b'{"format":"jaxckpt"')
            warned = [each for each in caplog.records if each.levelno == logging.WARNING]
            assert len(warned) == 1
            manager.save(5, {"state": state_of(5)})
            manager.wait()
        assert list(run.glob(".step-*")) == []


def test_removed_file_in_use_does_not_block_overwrite(tmp_path: Path) -> None:
    with poor(tmp_path, "hides files in use") as root:
        jct.save(root / "one", state_of(0))
        names = [".nfs00000000012345670000abcd", ".fuse_hidden0000001200000001", ".smb00A1"]
        for name in names:
            (root / "one" / name).write_bytes(b"removed, and open elsewhere")
        jct.save(root / "one", state_of(1), overwrite=True)
        assert_same(jct.load(root / "one"), 1)
        assert jct.verify(root / "one").ok
        assert os.listdir(root) == ["one"]
        (root / "one" / ".nfs is mine").write_bytes(b"")
        with pytest.raises(jct.CheckpointExistsError, match=r"\.nfs is mine"):
            jct.save(root / "one", state_of(2), overwrite=True)


@pytest.mark.parametrize(
    ("flaw", "failing"),
    [
        (None, []),
        ("no links", []),
        ("no rename flags", []),
        ("no cuts", ["size after closing"]),
        ("no direct I/O", []),
        ("hides files in use", []),
        ("no times", ["lock"]),
        ("copies", ["rename", "exchange"]),
    ],
)
def test_doctor_names_failing_operations(tmp_path: Path, flaw: str | None, failing: list[str]) -> None:
    with poor(tmp_path, *([] if flaw is None else [flaw])) as root:
        found = try_operations(LocalBackend(), str(root))
        assert [name for name, problem in found.items() if problem] == failing
        assert os.listdir(root) == []


@pytest.mark.parametrize(("flaw", "code"), [("no links", 0), ("no times", 1), ("copies", 1)])
def test_doctor_fails_where_no_run_works(tmp_path: Path, flaw: str, code: int) -> None:
    with poor(tmp_path, flaw) as root:
        found = json_of("doctor", root, "--size-mib", 1, code=code)
        assert bool(found["warnings"]) is bool(code)
        assert (found["operations"]["lock"] is None) == (flaw != "no times")


def test_every_flaw_is_tested() -> None:
    assert {*SUBSTITUTED, "no cuts", "no times", "copies"} == FLAWS.keys()
