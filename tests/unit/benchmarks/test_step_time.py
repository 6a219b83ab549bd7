"""benchmarks.step_time: its arithmetic, and a save that disturbs the training is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_time, step_time_turn
from benchmarks.cost_fit import quantile
from benchmarks.step_time_model import Size, Training
from benchmarks.step_time_subjects import Nothing, Subject, Wait, make_subject
from benchmarks.step_time_summary import Summary, summarise
from benchmarks.step_time_turn import Cycle, run_cycle

Measure = Callable[[Subject], Summary]

TINY = Size(layers=1, width=64, batch=1, window=8)
SAVE_S = 0.2


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s, self.was_read_in_background = 0.0, threading.Event()

    def perf_counter(self) -> float:
        if threading.current_thread() is not threading.main_thread():
            self.was_read_in_background.set()
        return self.now_s


class Disturbing:
    """A library and its training, whose steps take three times as long during a save."""

    state = None

    nbytes = 0

    def __init__(self, clock: Clock) -> None:
        self._clock, self._ends_s, self._ended = clock, 0.0, threading.Event()

    def step(self) -> tuple[float, float]:
        began = self._clock.now_s
        self._clock.now_s += 0.03 if began < self._ends_s else 0.01
        if self._clock.now_s >= self._ends_s > began:
            self._ended.set()
            assert self._clock.was_read_in_background.wait(60), "the end of the save was not noticed"
        return began, self._clock.now_s

    def start_save(self, path: Path, tree: Any) -> Wait:
        self._ended.clear()
        self._ends_s = self._clock.now_s + SAVE_S
        return self._ended.wait

    def load(self, path: Path, like: Any) -> Any:
        raise NotImplementedError


class Blocking(Disturbing):
    """A library that saves before its call returns, and an undisturbed training."""

    def start_save(self, path: Path, tree: Any) -> Wait:
        self._clock.now_s += 0.1
        return lambda: None


class Failing:
    """A library whose save fails in the background."""

    def start_save(self, path: Path, tree: Any) -> Wait:
        def wait() -> None:
            raise OSError("no space")

        return wait

    def load(self, path: Path, like: Any) -> Any:
        raise NotImplementedError


def cycle_of(quiet_s: float, during_s: float, blocking_s: float = 0.5) -> Cycle:
    """Return a cycle of four quiet steps, a call, three steps during the save, and one after it."""
    return Cycle(
        quiet_s=[quiet_s] * 4,
        during_s=[during_s] * 3,
        after_s=[quiet_s],
        blocking_s=blocking_s,
        save_s=blocking_s + 3 * during_s,
        quiet_wall_s=4 * quiet_s,
        block_wall_s=blocking_s + 3 * during_s + quiet_s,
    )


@pytest.fixture(scope="module")
def training() -> Training:
    made = Training(TINY)
    made.step()
    return made


@pytest.fixture
def measured(training: Training, tmp_path: Path) -> Measure:
    def measure(subject: Subject) -> Summary:
        return summarise([[run_cycle(training, subject, tmp_path / f"save-{number}", steps=4) for number in range(2)]])

    return measure


def test_summary_of_steps_is_computed() -> None:
    one = summarise([[cycle_of(1.0, 1.2)], [cycle_of(2.0, 3.0)], [cycle_of(1.0, 1.1)]])
    assert one.ratio.median == pytest.approx(1.2)
    assert (one.ratio.minimum, one.ratio.maximum) == (pytest.approx(1.1), pytest.approx(1.5))
    assert one.lost_s.median == pytest.approx(0.5 + 3 * 0.2)
    assert one.slowdown.maximum == pytest.approx((0.5 + 9.0 + 2.0) / 4 / 2.0)
    assert one.during_steps == 9
    assert not one.within_target
    assert summarise([[cycle_of(1.0, 1.09)]]).within_target


def test_tail_covers_all_rounds() -> None:
    one = summarise([[cycle_of(1.0, 1.0)], [cycle_of(1.0, 4.0)]])
    assert one.during_tail_s == pytest.approx(4.0)
    assert one.tail_ratio == pytest.approx(4.0)


def test_quantiles_interpolate_between_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([5.0], 0.9) == 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_time_turn, "time", made)
    return made


def test_steps_slowed_by_a_save_are_measured(tmp_path: Path, clock: Clock) -> None:
    both: Any = Disturbing(clock)
    slow = summarise([[run_cycle(both, both, tmp_path / "save", steps=4)]])
    assert slow.first_ratio.median == pytest.approx(3)
    assert slow.ratio.median > 2
    assert slow.slowdown.median > 1.5
    assert not slow.within_target
    assert slow.save_s.median >= SAVE_S


def test_blocking_call_is_measured(tmp_path: Path, clock: Clock) -> None:
    both: Any = Blocking(clock)
    blocking = summarise([[run_cycle(both, both, tmp_path / "save", steps=4)]])
    assert blocking.blocking_s.median == pytest.approx(0.1)
    assert blocking.lost_s.median == pytest.approx(0.1)
    assert blocking.during_steps >= 1  # the first step after each call always counts


@pytest.mark.nightly
def test_the_control_disturbs_nothing(measured: Measure) -> None:
    control = measured(Nothing(0.05))
    assert control.blocking_s.median < 0.01
    assert control.during_steps > 0


def test_failed_save_raises_its_error(measured: Measure) -> None:
    with pytest.raises(OSError, match="no space"):
        measured(Failing())


def test_ours_is_measured_and_leaves_nothing_behind(measured: Measure, tmp_path: Path) -> None:
    ours = measured(make_subject("ours"))
    assert 0 < ours.blocking_s.minimum <= ours.save_s.maximum
    assert list(tmp_path.iterdir()) == []


def test_unknown_subjects_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.main(["--subjects", "ours,theirs"])
    assert "theirs" in capsys.readouterr().err
