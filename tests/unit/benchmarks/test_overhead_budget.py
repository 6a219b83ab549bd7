"""benchmarks.overhead_budget: its arithmetic, its own clock, and the write limit of a disk."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from benchmarks import overhead_report, overhead_training
from benchmarks.overhead_summary import as_overhead, overhead_of
from benchmarks.overhead_training import Block, OwnTime, SavingLoop
from benchmarks.write_limit import CannotLimitError, WriteLimit, device_of
from jaxckpt_train import manager
from tests.support.fake_backends import HoldingBackend
from tests.support.recorded_benchmark import WITH_VERSIONS

MIB = 1 << 20
UPDATES_DURING_SAVE = 1000


def saves_at(*times: float) -> list[dict[str, Any]]:
    return [{"at_s": at, "reason": "due", "lasted_s": 1.5, "spent": 0.02} for at in times]


def stored(*times: float) -> dict[str, Any]:
    return {"saves": saves_at(*times), "costs": {"spent_s": 3.0, "trained_s": 100.0}}


def test_blocks_are_compared_with_those_on_both_sides() -> None:
    bare = [Block(10, 10.0, 0), Block(10, 12.0, 0), Block(10, 11.0, 0)]
    saving = [Block(10, 12.1, 1), Block(20, 23.0, 2)]
    found = overhead_of(bare, saving, stored(2.0, 12.0, 26.0))
    assert found.measured.maximum == pytest.approx(1.21 / 1.1 - 1)
    assert found.measured.minimum == pytest.approx(1.15 / 1.15 - 1)
    assert found.total == pytest.approx(35.1 / (11.0 + 23.0) - 1)
    assert (found.noise.minimum, found.noise.maximum) == (pytest.approx(11 / 12 - 1), pytest.approx(0.2))
    assert found.policy == pytest.approx(0.03)
    assert found.interval_s is not None
    assert (found.interval_s.minimum, found.interval_s.maximum, found.saves) == (10.0, 14.0, 3)
    assert as_overhead(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_a_disk_without_saves_has_no_interval() -> None:
    found = overhead_of(
        [Block(5, 5.0, 0)] * 2, [Block(5, 5.0, 0)], {**stored(), "costs": {"spent_s": 0, "trained_s": 0}}
    )
    assert (found.interval_s, found.lasted_s, found.policy, found.total) == (None, None, 0.0, 0.0)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


def test_own_time_stops_while_another_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(overhead_training, "time", clock)
    own = OwnTime()
    began, date = own.seconds(), own.utc()
    clock.now += 2
    own.stop()
    clock.now += 100
    assert own.seconds() - began == 2
    own.go_on()
    clock.now += 3
    own.stop()
    clock.now += 10
    own.go_on()
    assert own.seconds() - began == 5
    assert (own.utc() - date).total_seconds() == 5


class SlowToSave:
    """A training whose first save waits on the disk until more updates are complete."""

    def __init__(self, backend: HoldingBackend) -> None:
        self.model, self.optimizer, self.data = {"w": jnp.zeros(4)}, {"m": jnp.zeros(4)}, jct.JsonValue({})
        self._backend, self.updates_during_save = backend, 0

    def update(self) -> float:
        if self._backend.reached.is_set():
            self.updates_during_save += 1
        if self.updates_during_save == UPDATES_DURING_SAVE:
            self._backend.go.set()
        return 0.0


def test_block_ends_after_its_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HoldingBackend("rename", "step-")
    monkeypatch.setattr(manager, "backend_for", lambda _: backend)
    training: Any = SlowToSave(backend)
    loop = SavingLoop(training, tmp_path / "run")
    while not loop.saves:  # until the policy has measured an update
        loop.block(0.1)
    assert training.updates_during_save >= UPDATES_DURING_SAVE
    assert not loop.costs().is_measuring
    loop.close()
    assert loop.saves[0].lasted_s is not None


def test_limit_applies_to_the_whole_disk(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    disk = tmp_path / "real" / "disk"
    (disk / "part").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n", encoding="ascii")
    (disk / "part" / "dev").write_text("8:1\n", encoding="ascii")
    (disk / "part" / "partition").write_text("1\n", encoding="ascii")
    devices = tmp_path / "devices"
    devices.mkdir()
    (devices / name).symlink_to(disk / "part")
    assert device_of(tmp_path, devices) == "8:0"
    (devices / name).unlink()
    with pytest.raises(CannotLimitError, match="no block device"):
        device_of(tmp_path, devices)


@pytest.mark.parametrize(
    ("is_v2", "file", "limited", "free"),
    [(True, "io.max", "8:0 wbps=5", "8:0 wbps=max"), (False, "blkio.throttle.write_bps_device", "8:0 5", "8:0 0")],
)
def test_kernel_limits_are_written(tmp_path: Path, is_v2: bool, file: str, limited: str, free: str) -> None:
    limit = WriteLimit(str(tmp_path), "8:0", is_v2)
    limit.set(5)
    assert (tmp_path / file).read_text(encoding="ascii") == limited
    limit.set(None)
    assert (tmp_path / file).read_text(encoding="ascii") == free


def test_a_page_has_the_figures_and_its_plot(tmp_path: Path) -> None:
    found = overhead_of([Block(10, 10.0, 0)] * 2, [Block(10, 10.3, 1)], stored(1.0, 12.0))
    disk = {"overhead": dataclasses.asdict(found), "bytes_per_s": 15 * MIB}
    phases = {**stored(1.0, 6.0, 30.0, 55.0), "rates": [None, 15 * MIB], "ends_s": [0.0, 20.0, 60.0]}
    results = {"fraction": 0.035, "disks": {"slow": disk}, "phases": phases}
    overhead_report.write(tmp_path, WITH_VERSIONS, results)
    page = (tmp_path / "overhead-budget.md").read_text(encoding="utf-8")
    for text in (
        "| slow, 15 MiB/s | 3.00% |",
        "a budget of 3.5%",
        "| fast | 20 | 2 | 5.0<br>",
        "| 15 MiB/s | 40 | 2 | 25.0<br>",
    ):
        assert text in page
    assert (tmp_path / "overhead-budget.png").stat().st_size > 0


def test_disk_without_write_limit_is_reported(tmp_path: Path) -> None:
    found = overhead_of([Block(10, 10.0, 0)] * 2, [Block(10, 10.3, 1)], stored(1.0))
    results = {"fraction": 0.035, "disks": {"fast": {"overhead": dataclasses.asdict(found)}}, "phases": None}
    overhead_report.write(tmp_path, WITH_VERSIONS, {**results, "left_out": "needs the right to make a control group"})
    assert "left out: the slow disk: needs the right" in (tmp_path / "overhead-budget.md").read_text(encoding="utf-8")
