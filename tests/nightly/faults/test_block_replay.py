"""Acknowledged saves survive every state of a real device after a power failure; without syncs some are lost.

`make block-replay` runs the whole campaign.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.settings import StoreSettings
from tests.nightly.faults import block_replay
from tests.nightly.faults.block_recorder import recorded_disk
from tests.nightly.faults.block_replay import KINDS, _blocks_of, _write, campaign, replayed, why_not

pytestmark = pytest.mark.timeout(300)

TRIES = 8


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"cannot record a device with {request.param}: {reason}")
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)
    return str(request.param)


@pytest.mark.parametrize("program", ["run", "single"])
def test_acknowledged_saves_survive_any_device_state(tmp_path: Path, kind: str, program: str) -> None:
    found = campaign(tmp_path, kind, 8, seed=0, programs=[program])
    assert found.problems == []
    assert found.states == 8
    assert found.with_saves > 2


ALL = [(kind, *each) for kind in KINDS for each in (("run", "file"), ("run", "none"), ("single", "none"))]


@pytest.mark.parametrize(
    ("kind", "program", "durability"),
    ALL,
    indirect=["kind"],
)
def test_saves_that_do_not_sync_are_detected(tmp_path: Path, kind: str, program: str, durability: Any) -> None:
    """The file system syncs some writes by itself, which varies from run to run."""
    settings = StoreSettings(durability=durability)
    for seed in range(TRIES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        problems = campaign(folder, kind, 12, seed, settings, [program], keep=tmp_path / "kept").problems
        if any(": lost: " in problem or ": deleted: " in problem for problem in problems):
            kept = next((tmp_path / "kept").iterdir())
            assert {path.name for path in kept.iterdir() if path.stat().st_size} == {"start", "list", "facts"}
            return
    raise AssertionError(f"nothing acknowledged was lost in {TRIES} tries")


def test_every_write_is_recorded(tmp_path: Path, kind: str) -> None:
    with recorded_disk(tmp_path, kind) as disk:
        before = disk.written()
        with (disk.path / "file").open("wb") as file:
            file.write(b"a line that is nowhere else" * 1000)
            file.flush()
        with (disk.path / "file").open("rb+") as file:
            os.fsync(file.fileno())
        changes = [each for each in disk.changes() if each.end > before]
    contents = [each.data for each in changes if each.data is not None and b"a line that is nowhere else" in each.data]
    assert sum(content.count(b"a line that is nowhere else") for content in contents) > 900
    assert changes[-1].data is None, "a sync ends with a flush of the device"


@pytest.mark.parametrize("kind", ["ext4", "xfs"], indirect=True)
def test_recording_continues_after_power_cuts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_replay, "CONTINUE_SHARE", 1.0)
    monkeypatch.setattr(block_replay, "STATES_OF_ONE", 8)
    found = campaign(tmp_path, kind, 16, seed=1)
    assert found.problems == []
    assert found.with_saves > 10


def test_mounted_state_is_current_despite_cached_reads(tmp_path: Path, kind: str) -> None:
    (tmp_path / "recorded").mkdir()
    with recorded_disk(tmp_path / "recorded", kind) as disk:
        (disk.path / "file").write_text("content")
        os.sync()
        empty, changes = _blocks_of(disk.start), list(disk.changes())
    full = empty.copy()
    for change in changes:
        if change.data is not None:
            _write(full, change, lambda: True)
    with replayed(tmp_path, kind) as again:
        device = os.open(again._device, os.O_RDONLY)
        try:
            for blocks, exists in ((full, True), (empty, False), (full, True)):
                again.hold(blocks)
                with again.mounted():
                    assert (again.path / "file").exists() == exists
                os.pread(device, 16 << 20, 0)  # the kernel caches these blocks while the device is open
        finally:
            os.close(device)
