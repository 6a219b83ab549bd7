"""benchmarks.goodput: its schedule, its arithmetic, and the logs of its processes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goodput, goodput_log, goodput_report
from benchmarks.goodput_attempt import Attempt
from benchmarks.goodput_costs import SaveCost, cost_of, interval_for
from benchmarks.goodput_facts import Facts, facts_of, median_update_s
from benchmarks.goodput_kills import Kill, mtbf_s, schedule, within
from benchmarks.goodput_log import AttemptRecord, Log, Update
from benchmarks.goodput_losses import Losses
from benchmarks.goodput_subjects import INTERVALS, SUBJECTS
from benchmarks.goodput_summary import as_goodput, goodput_of
from jaxckpt_train.policies.save import daly_interval_s
from tests.support.recorded_benchmark import WITH_VERSIONS

MEAN_S = goodput.MEAN_S
UPDATE_S = 0.5


def kills(seed: int) -> list[Kill]:
    return list(itertools.islice(schedule(seed, least_s=MEAN_S / 3, mean_s=MEAN_S, most_s=3 * MEAN_S), 400))


def attempt(
    record: AttemptRecord, *, sent_at: float | None = 19.0, ended_at: float = 20.0, asked: bool = False
) -> Attempt:
    return Attempt(
        began_at=10.0, sent_at=sent_at, ended_at=ended_at, asked=asked, code=75 if asked else -9, record=record
    )


def facts(restored: int | None, last: int | None, **other: Any) -> Facts:
    """Return an attempt of 10 s: a start of 2 s, a restore of 1 s, 0.25 s in calls."""
    began = restored is not None
    made: dict[str, Any] = {
        "wall_s": 10.0,
        "made_s": 2.0 if began else None,
        "restored_s": 3.0 if began else None,
        "first_s": 4.0 if last is not None else None,
        "called_s": 0.25 if began else 0.0,
        "asked": False,
        "left_itself": False,
        "leaving_s": 0.0,
        "is_scheduled": True,
    }
    return Facts(restored=restored, last=last, **{**made, **other})


def test_schedule_depends_on_its_seed() -> None:
    assert kills(1) == kills(1)
    assert kills(1) != kills(2)


def test_half_of_the_kills_are_requests() -> None:
    found = kills(3)
    assert all(one.asks != other.asks for one, other in zip(found[::2], found[1::2], strict=True))
    assert len({one.asks for one in found[::2]}) == 2
    assert all(MEAN_S / 3 <= kill.after_s <= 3 * MEAN_S for kill in found)


def test_ten_minutes_have_twenty_kills_by_default() -> None:
    assert len(within(kills(1), goodput.SECONDS)) >= 20


def test_only_kills_count_for_mean_time_between_losses() -> None:
    ends = [Kill(15.0, asks=True), Kill(25.0, asks=False), Kill(5.0, asks=True), Kill(2.0, asks=False)]
    assert mtbf_s(ends, start_s=5.0) == pytest.approx((10 + 20 + 0 + 0) / 2)
    assert within(ends, 40.0) == ends[:2]


def test_log_is_readable_after_every_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    assert goodput_log.read(tmp_path / "log") == AttemptRecord()
    log.made()
    log.restored(7)
    log.update(8, 0.1)
    log.called(8)
    log.update(9, 1 / 3)
    record = goodput_log.read(tmp_path / "log")
    assert record.restored == 7
    assert [(one.number, float.fromhex(one.loss)) for one in record.updates] == [(8, 0.1), (9, 1 / 3)]
    assert record.made_at is not None
    assert record.updates[0].called_s is not None
    assert record.updates[1].called_s is None
    assert record.made_at <= record.updates[0].at <= record.updates[1].at


def test_process_without_output_counts_as_startup(tmp_path: Path) -> None:
    found = facts_of(attempt(goodput_log.read(tmp_path / "none")), is_scheduled=True)
    assert (found.made_s, found.restored, found.done, found.wall_s) == (None, None, 0, 10.0)


def test_time_in_calls_ends_with_kill_or_request() -> None:
    updates = (Update(4, 15.0, "0x1p0", 0.5), Update(5, 17.0, "0x1p0", None))
    record = AttemptRecord(made_at=12.0, restored_at=13.5, restored=3, updates=updates)
    killed = facts_of(attempt(record, sent_at=19.0, ended_at=19.0), is_scheduled=True)
    assert (killed.made_s, killed.restored_s, killed.first_s, killed.done) == (2.0, 3.5, 5.0, 2)
    assert killed.called_s == pytest.approx(0.5 + 2.0)
    assert killed.leaving_s == 0
    asked = facts_of(attempt(record, sent_at=16.0, ended_at=18.0, asked=True), is_scheduled=True)
    assert asked.called_s == pytest.approx(0.5)  # without the time after the request
    assert (asked.leaving_s, asked.left_itself) == (2.0, True)


def test_goodput_of_attempts_is_computed() -> None:
    attempts = [
        facts(0, 8),  # 6 of these 8 were saved
        facts(6, 12, asked=True, left_itself=True, leaving_s=1.0),
        facts(None, None),  # killed during its start
        facts(12, 16, is_scheduled=False),  # 2 of these 4 were saved
    ]
    found = goodput_of(attempts, 14, UPDATE_S)
    assert (found.useful, found.done, found.redone) == (14, 18, 2)
    assert (found.kills, found.requests, found.late) == (2, 1, 0)
    assert found.share == pytest.approx(14 * UPDATE_S / 40)
    assert found.lost_by_kill is not None
    assert (found.lost_by_kill.minimum, found.lost_by_kill.maximum) == (0, 2)
    assert found.lost_by_request is not None
    assert found.lost_by_request.maximum == 0
    assert (found.shares.minimum, found.shares.maximum) == (0, pytest.approx(6 * UPDATE_S / 10))
    assert found.restore_s is not None
    assert (found.restore_s.median, found.resume_s and found.resume_s.median) == (1.0, 4.0)


def test_parts_of_the_time_add_up() -> None:
    attempts = [facts(0, 8), facts(6, 12, asked=True, left_itself=True, leaving_s=1.0), facts(None, None)]
    where = goodput_of(attempts, 12, UPDATE_S).where
    assert sum(dataclasses.astuple(where)) == pytest.approx(30)
    assert (where.starting, where.restoring, where.leaving, where.called) == (2 + 2 + 10, 2, 1, 0.5)
    assert (where.useful, where.lost) == (12 * UPDATE_S, 2 * UPDATE_S)


def test_request_during_restore_counts_as_restoring() -> None:
    asked = facts(None, None, made_s=2.0, asked=True, leaving_s=7.0)
    where = goodput_of([asked], 0, UPDATE_S).where
    assert (where.starting, where.restoring, where.leaving, where.slower) == (2.0, 8.0, 0.0, 0.0)


def test_process_past_its_grace_period_is_late() -> None:
    assert goodput_of([facts(0, 4, asked=True, leaving_s=8.0)], 2, UPDATE_S).late == 1


def updates_with_saves(every: int, cycles: int, quiet_s: float, cost_s: float) -> tuple[Update, ...]:
    """Return updates whose saves cost half in the call and a quarter in each of the next two updates."""
    at, found = 100.0, []
    for number in range(1, every * cycles + 2):
        place = number % every
        at += quiet_s + (cost_s / 4 if place in (1, 2) and number > every else 0)
        found.append(Update(number, at, "0x1p0", cost_s / 2 if place == 0 else 0.0))
        at += cost_s / 2 if place == 0 else 0
    return tuple(found)


def test_the_cost_of_a_save_is_found() -> None:
    record = AttemptRecord(90.0, 95.0, 0, updates_with_saves(12, 6, quiet_s=0.1, cost_s=0.8))
    found = cost_of(record, 12, began_at=85.0)
    assert found.cost_s == pytest.approx(0.8)
    assert (found.update_s, found.called_s, found.saves) == (pytest.approx(0.1), pytest.approx(0.4), 4)
    assert found.start_s == pytest.approx(15.1)
    interval = interval_for(found, mtbf_s=40.0)
    assert interval.seconds == pytest.approx(daly_interval_s(0.8, 40.0) + 0.8)
    assert interval.steps == round(interval.seconds / 0.1)


def test_save_costs_at_least_its_call() -> None:
    noise = SaveCost(cost_s=-0.1, update_s=0.1, called_s=0.06, start_s=3.0, saves=4)
    assert interval_for(noise, 40.0).seconds == pytest.approx(daly_interval_s(0.06, 40.0) + 0.06)


def test_too_few_saves_are_refused() -> None:
    with pytest.raises(ValueError, match="three saves"):
        cost_of(AttemptRecord(90.0, 95.0, 0, updates_with_saves(12, 2, 0.1, 0.8)), 12, 85.0)


def test_difference_in_last_bit_is_found() -> None:
    losses = Losses()
    losses.add(
        "one", attempt(AttemptRecord(updates=(Update(1, 0.0, (0.1).hex(), None), Update(2, 0.0, (0.2).hex(), None))))
    )
    losses.add("one", attempt(AttemptRecord(updates=(Update(2, 0.0, (0.2).hex(), None),))))
    assert (losses.compared, losses.conflicts) == (1, [])
    losses.add("two", attempt(AttemptRecord(updates=(Update(1, 0.0, (0.1 + 2**-56).hex(), None),))))
    assert losses.compared == 2
    assert len(losses.conflicts) == 1
    assert "update 1: two" in losses.conflicts[0]


def test_undisturbed_update_time_is_a_median() -> None:
    found = median_update_s([[1.0, 1.0, 1.0, 4.0], [2.0]])
    assert (found.median, found.minimum, found.maximum) == (1.0, 1.0, 2.0)


def example_results() -> dict[str, Any]:
    found = goodput_of([facts(0, 8), facts(6, 12, asked=True, left_itself=True)], 12, UPDATE_S)
    return {
        "seconds": 20.0,
        "seed": 1,
        "update_s": {"median": UPDATE_S, "minimum": UPDATE_S, "maximum": UPDATE_S},
        "costs": {"ours_fixed": {"cost_s": 0.125, "called_s": 0.01}},
        "intervals": {"ours_fixed": {"steps": 40, "seconds": 2.5}},
        "goodput": {"ours_fixed": json.loads(json.dumps(dataclasses.asdict(found)))},
        "failed": {"orbax_v1": "orbax_v1 left with 1:\nTraceback"},
        "compared": 1234,
        "conflicts": [],
    }


def test_a_page_has_the_figures_and_its_plot(tmp_path: Path) -> None:
    goodput_report.write(tmp_path, WITH_VERSIONS, example_results())
    page = (tmp_path / "goodput.md").read_text(encoding="utf-8")
    for text in (
        "30.0%",
        "1,234 compared bit by bit, all equal",
        "125 ms",
        "40 updates, 2.5 s",
        "orbax_v1 left with 1",
    ):
        assert text in page
    assert (tmp_path / "goodput.png").stat().st_size > 0


def test_losses_that_differ_are_on_the_page() -> None:
    lines = goodput_report.checks({**example_results(), "conflicts": ["update 3: a 0x1, b 0x2"]})
    assert "1 DIFFER, such as update 3: a 0x1, b 0x2" in lines[0]


def test_a_goodput_survives_json() -> None:
    found = goodput_of([facts(0, 8)], 8, UPDATE_S)
    assert as_goodput(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_interval_of_every_subject_is_measured() -> None:
    assert set(INTERVALS) | set(INTERVALS.values()) <= set(SUBJECTS)
    assert not set(INTERVALS) & set(INTERVALS.values())


def test_unknown_subjects_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        goodput.main(["--subjects", "ours_fixed,theirs"])
    assert "theirs" in capsys.readouterr().err
