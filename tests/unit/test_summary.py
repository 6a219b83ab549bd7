"""`ckpt.summary()`: how a run spent its time, while it trains, afterwards, for readers, and over many processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.run.goodput import Goodput
from tests.support.fake_backends import HoldingBackend, RefusingBackend, callback_on
from tests.support.locks import is_owned
from tests.support.runs import Counter, made_run, state_of
from tests.support.signal_handlers import WATCHED, handlers_put_back
from tests.support.summary_runs import callback, rows, train


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def test_summary_works_during_and_after_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(callback(tmp_path), 100, asked_at=15)
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0), Counter())
        before = ckpt.summary(show=False)
        assert rows(before) == [("preempted", 0, 15, 15, 0, 2), ("running", 15, 15, 0, 0, 0)]
        for step in ckpt.steps(30):
            ckpt(state_of(step + 1))
            if step == 22:
                ckpt.wait_until_finished()
                during = ckpt.summary(show=False)
                assert rows(during)[1] == ("running", 15, 23, 8, 0, 1)
    after = ckpt.summary(show=False)
    assert rows(after) == [("preempted", 0, 15, 15, 0, 2), ("finished", 15, 30, 15, 0, 2)]
    assert (after.useful_steps, after.redone_steps, after.saves) == (30, 0, 4)
    saves = [event for event in ckpt.manager.history.events() if event["event"] == "save"]
    assert after.blocked_s == pytest.approx(sum(event["blocked_s"] for event in saves))
    assert after.to_resume_s == pytest.approx(sum(each.to_resume_s for each in after.attempts))
    assert 0 < after.useful_s < after.wall_s
    assert before.wall_s <= during.wall_s <= after.wall_s
    assert 0 < after.share < 1
    assert capsys.readouterr().out == ""
    assert ckpt.summary() == after
    printed = capsys.readouterr().out
    assert printed.startswith("2 processes, useful time ")
    assert ("preempted" in printed, "finished" in printed, "total" in printed) == (True, True, True)


@pytest.mark.parametrize(
    ("ending", "how"),
    [
        (None, "finished"),
        (KeyError("mine"), "KeyError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit"),
        (SystemExit(0), "closed"),
    ],
)
def test_summary_reports_how_each_process_ended(tmp_path: Path, ending: BaseException | None, how: str) -> None:
    def loop() -> None:
        with callback(tmp_path) as ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(12):
                ckpt(state_of(step + 1))
                if step == 10 and ending is not None:
                    raise ending

    if ending is None:
        loop()
    else:
        with pytest.raises(type(ending)):
            loop()
    (row,) = jct.StepManager(tmp_path).goodput().attempts
    assert (row.how, row.last_step) == (how, 12 if ending is None else 11)


def test_ends_of_loops_with_and_without_with(tmp_path: Path) -> None:
    with callback(tmp_path / "broken") as broken:
        broken.resume(state_of(0))
        for step in broken.steps(12):
            broken(state_of(step + 1))
            if step == 4:
                break
    assert [each.how for each in broken.summary(show=False).attempts] == ["closed"]
    plain = callback(tmp_path / "plain")
    plain.resume(state_of(0))
    for step in plain.steps(12):
        plain(state_of(step + 1))
    plain.close()
    assert [each.how for each in plain.summary(show=False).attempts] == ["finished"]


@pytest.mark.parametrize("failing", [10, 12])
def test_process_whose_last_save_failed_has_not_finished(tmp_path: Path, failing: int) -> None:
    backend = RefusingBackend("create", f"step-{failing:010d}", 28, 10)
    ckpt = callback_on(backend, tmp_path, save_interval_steps=10)
    with pytest.raises(jct.StorageError):
        train(ckpt, 12)
    (row,) = ckpt.summary(show=False).attempts
    assert row.how == "StorageError"


def test_process_without_last_save_is_unfinished(tmp_path: Path) -> None:
    ckpt = callback(tmp_path)
    with pytest.raises(jct.UnsupportedLeafError), ckpt:
        ckpt.resume(state_of(0))
        ckpt({"w": object()})
    (row,) = ckpt.summary(show=False).attempts
    assert (row.how, row.saves) == ("UnsupportedLeafError", 0)


def test_reader_sees_that_a_run_is_active(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(25):
            ckpt(state_of(step + 1))
            if step == 22:
                ckpt.wait_until_finished()
                assert rows(jct.StepManager(tmp_path).goodput()) == [("running", 0, 20, 20, 0, 2)]
                reading = callback(tmp_path)
                assert rows(reading.summary()) == [("running", 0, 20, 20, 0, 2)]
    assert rows(jct.StepManager(tmp_path).goodput()) == [("finished", 0, 25, 25, 0, 3)]
    assert capsys.readouterr().out.startswith("1 process, useful time ")
    assert not is_owned(tmp_path)


def test_callbacks_of_one_process_in_sequence(tmp_path: Path) -> None:
    for number in range(1, 6):
        train(callback(tmp_path), 10 * number)
    found = jct.StepManager(tmp_path).goodput()
    assert rows(found) == [("finished", 10 * n, 10 * n + 10, 10, 0, 1) for n in range(5)]
    assert found.useful_steps == 50


def test_a_callback_that_resumes_again_goes_back(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in range(1, 16):
            ckpt(state_of(step))
        ckpt.wait_until_finished()
        ckpt.resume(state_of(0))
        ckpt(state_of(11), step=11)
    assert rows(ckpt.summary(show=False)) == [("closed", 0, 11, 11, 5, 2)]


def test_own_manager_is_in_summary(tmp_path: Path) -> None:
    made_run(tmp_path, 10, 20, 30)
    with jct.StepManager(tmp_path) as manager:
        manager.restore(step=20)  # as a reader: it has no lock yet
        manager.save(25, {"state": state_of(25)})
        manager.restore(step=10)
        manager.save(12, {"state": state_of(12)})
        manager.wait()
        assert rows(manager.goodput()) == [("closed", 0, 30, 10, 20, 3), ("running", 20, 12, 2, 5, 2)]
    with jct.StepManager(tmp_path) as evaluation:
        evaluation.attach_metrics(12, {"loss": 1.0})
    expected = [("closed", 0, 30, 10, 20, 3), ("closed", 20, 12, 2, 5, 2)]
    assert rows(evaluation.goodput()) == expected


def test_disabled_callback_has_an_empty_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt = callback(tmp_path / "run", enabled=False)
    train(ckpt, 30)
    assert ckpt.summary() == Goodput()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()


def test_missing_run_has_an_empty_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert callback(tmp_path / "run").summary() == Goodput()
    assert capsys.readouterr().out.startswith("0 processes, useful time 0.0%")
    assert not (tmp_path / "run").exists()


def test_history_that_cannot_be_read_is_error(tmp_path: Path) -> None:
    made_run(tmp_path, 10)
    with pytest.raises(jct.StorageError):
        callback_on(RefusingBackend("open", "history.jsonl", 5, 1), tmp_path).summary()


def test_hung_history_disk_raises_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path, 10)
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", 0.02)
    monkeypatch.setattr("jaxckpt_train.store.timeouts.POLL_S", 0.02)
    backend = HoldingBackend("open", "history.jsonl")
    with pytest.raises(jct.CheckpointTimeoutError, match="no progress for"):
        callback_on(backend, tmp_path).summary()
    backend.go.set()
