"""After a power failure of a real file system the newest acknowledged step is there; without syncs it is not.

`make power-cuts` runs the whole campaign.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxckpt_train.settings import StoreSettings
from tests.nightly.faults.loop_disk import LoopDisk, loop_disk, why_not
from tests.nightly.faults.power_cut import CUTS, campaign

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopDisk]:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"cannot cut the power of {request.param}: {reason}")
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)
    with loop_disk(tmp_path, request.param) as made:
        yield made


def test_acknowledged_saves_survive_a_power_cut(disk: LoopDisk) -> None:
    found = campaign(disk, trials=10, seed=0)
    assert found.problems == []
    assert found.cuts == {"nothing flushed": 5, "journal flushed": 5}
    assert found.acknowledged > 3


def test_unsynced_saves_are_detected_by_both_cuts(disk: LoopDisk) -> None:
    """Repeat with more cuts, because a slow machine may write unsynced data before the cut."""
    missing, problems = set(CUTS), []
    for seed in range(1, 9):
        problems += campaign(disk, trials=8, seed=seed, settings=StoreSettings(durability="none")).problems
        missing -= {cut for cut in CUTS if any("was acknowledged" in text and cut in text for text in problems)}
        if not missing:
            return
    raise AssertionError(f"not detected by {missing}: {problems}")


def test_cut_that_flushes_journal_leaves_names_without_data(disk: LoopDisk) -> None:
    found = {}
    for cut in CUTS:
        disk.unmount()
        disk.make_new()
        (disk.path / "file").write_bytes(b"content")
        disk.cut_power(cut)
        disk.unmount()
        disk.mount()
        found[cut] = {path.name: path.read_bytes().strip(b"\0") for path in disk.path.glob("file")}
    assert found == {"nothing flushed": {}, "journal flushed": {"file": b""}}
