"""A preempted job saves its last completed update, at the right position in the data, and exits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxckpt_train as jct
from tests.support.runs import Counter, made_run, state_of, step_of
from tests.support.signal_handlers import WATCHED, handlers_put_back

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def callback(directory: Path, **options: Any) -> jct.CheckpointCallback:
    return jct.CheckpointCallback(str(directory), **{"save_interval_steps": 100, **options})


def send(name: str = "SIGTERM") -> None:
    os.kill(os.getpid(), getattr(signal, name))


def train(directory: Path, asked_at: int, **options: Any) -> None:
    """Run a loop that receives a signal in the middle of one update."""
    with callback(directory, **options) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(50):
            assert next(data) == step <= asked_at
            if step == asked_at:
                send()
            ckpt(state_of(step + 1))


def check_saved(directory: Path, step: int) -> None:
    """Check that exactly this step is saved, with its position in the data."""
    manager = jct.StepManager(directory)
    assert manager.steps == [step]
    restored = manager.restore({"state": state_of(0), "data": Counter()})
    assert (step_of(restored), restored["data"].position) == (step, step)


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_ends_loop_with_last_update_saved(tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit) as caught, callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(50):
            assert next(data) == step <= 3
            if step == 3:
                send(name)
            ckpt(state_of(step + 1))
        assert ckpt.preempted
    assert caught.value.code == 75
    check_saved(tmp_path, 4)
    event, end = jct.StepManager(tmp_path).history.events()[-2:]
    assert (end["event"], end["how"], end["step"]) == ("end", "preempted", 4)
    assert (event["event"], event["step"], event["reason"]) == ("preempted", 4, f"signal {name}")


def test_the_exit_code_is_the_configured_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, 1, exit_code=13)
    assert caught.value.code == 13


def test_preemption_may_raise_an_ordinary_error(tmp_path: Path) -> None:
    with pytest.raises(jct.Preempted, match="SIGTERM; step 2 is saved") as caught:
        train(tmp_path, 1, on_preemption="raise")
    assert (caught.value.step, caught.value.exit_code) == (2, 75)
    check_saved(tmp_path, 2)


def test_preempted_multirun_job_raises_an_ordinary_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.callback.is_multirun", lambda: True)
    with pytest.raises(jct.Preempted, match="step 2 is saved"):
        train(tmp_path / "auto", 1)
    with pytest.raises(SystemExit):
        train(tmp_path / "exit", 1, on_preemption="exit")


def test_next_run_resumes_where_preempted_one_stopped(tmp_path: Path) -> None:
    for asked_at in (2, 5, 9):
        with pytest.raises(SystemExit):
            train(tmp_path, asked_at, keep_latest=1)
        check_saved(tmp_path, asked_at + 1)


def test_signal_ends_custom_loop_at_its_call(tmp_path: Path) -> None:
    data = Counter()
    with pytest.raises(SystemExit) as caught, callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0), data)
        for batch in data:
            if batch == 2:
                send()
            ckpt(state_of(batch + 1))
            assert batch < 2
    assert caught.value.code == 75
    check_saved(tmp_path, 3)


def test_preempted_loop_without_with_statement_ends(tmp_path: Path) -> None:
    ckpt = callback(tmp_path)
    _, data = ckpt.resume(state_of(0), Counter())
    for step in ckpt.steps(50):
        next(data)
        if step == 1:
            send()
        ckpt(state_of(step + 1))
    assert ckpt.preempted
    ckpt.close()
    check_saved(tmp_path, 2)


def test_step_that_is_due_anyway_is_saved_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, 3, save_interval_steps=4)
    events = [event for event in jct.StepManager(tmp_path).history.events() if event["event"] == "save"]
    assert [(event["step"], event["reason"]) for event in events] == [(4, "preemption: signal SIGTERM")]


def test_request_during_evaluation_saves_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(50):
            next(data)
            ckpt(state_of(step + 1))
            assert not ckpt.poll()
            if step == 2:
                send()
                assert ckpt.poll()
                assert ckpt.poll()
                assert ckpt.latest_step() == 3
            assert step <= 2
    check_saved(tmp_path, 3)


def test_poll_before_update_saves_no_wrong_position(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(50):
            next(data)
            if step == 2:
                send()
                assert ckpt.poll()
                assert ckpt.latest_step() is None
            assert step <= 2
            ckpt(state_of(step + 1))
    check_saved(tmp_path, 3)


def test_poll_in_custom_loop_saves_no_wrong_position(tmp_path: Path) -> None:
    data = Counter()
    with pytest.raises(SystemExit), callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0), data)
        for batch in data:
            if batch == 2:
                send()
                assert ckpt.poll()
            ckpt(state_of(batch + 1))
    check_saved(tmp_path, 3)


def test_signal_during_compilation_waits_for_update(tmp_path: Path) -> None:
    @jax.jit
    def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        send()  # runs while the function is traced
        return {"w": state["w"] + 1, "step": state["step"] + 1}

    with pytest.raises(SystemExit), callback(tmp_path) as ckpt:
        state, data = ckpt.resume(state_of(0), Counter())
        for _ in ckpt.steps(50):
            next(data)
            state = update(state)
            ckpt(state)
    check_saved(tmp_path, 1)


@pytest.mark.parametrize("polled", [False, True])
def test_request_before_first_step_saves_nothing(tmp_path: Path, polled: bool) -> None:
    with (
        pytest.raises(jct.Preempted, match="no step is saved") as caught,
        callback(tmp_path, on_preemption="raise") as ckpt,
    ):
        ckpt.resume(state_of(0), Counter())
        send()
        if polled:
            assert ckpt.poll()
        assert list(ckpt.steps(50)) == []
    assert caught.value.step is None
    assert jct.StepManager(tmp_path).steps == []


def test_request_after_resume_keeps_the_resumed_step(tmp_path: Path) -> None:
    with (
        pytest.raises(jct.Preempted, match="step 5 is saved") as caught,
        callback(made_run(tmp_path, 5), on_preemption="raise") as ckpt,
    ):
        ckpt.resume(state_of(0))
        send()
        assert list(ckpt.steps(50)) == []
    assert caught.value.step == 5
    assert jct.StepManager(tmp_path).steps == [5]


def test_users_signal_handler_is_called_and_restored(tmp_path: Path) -> None:
    seen: list[int] = []

    def own(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit):
            train(tmp_path, 1)
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_notice_file_requests_shutdown(tmp_path: Path) -> None:
    notice = tmp_path / "leave"
    with pytest.raises(SystemExit), callback(tmp_path / "run", notice_file=str(notice), signals=()) as ckpt:
        ckpt.resume(state_of(0))
        notice.touch()
        for step in ckpt.steps(50):
            ckpt(state_of(step + 1))
    assert jct.StepManager(tmp_path / "run").steps == []


def test_time_limit_leaves_time_for_last_save(tmp_path: Path) -> None:
    with (
        pytest.raises(jct.Preempted, match="shutdown requested by the time limit"),
        callback(tmp_path, max_run_time_s=20.00001, grace_period_s=20.0, on_preemption="raise") as ckpt,
    ):
        ckpt.resume(state_of(0))
        ckpt(state_of(1))
    assert jct.StepManager(tmp_path).steps == [1]


def test_other_thread_watches_notice_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notice = tmp_path / "leave"
    raised: list[BaseException] = []

    def loop() -> None:
        try:
            with callback(tmp_path / "run", notice_file=str(notice)) as ckpt:
                ckpt.resume(state_of(0))
                for step in ckpt.steps(1):
                    ckpt(state_of(step + 1))
                notice.touch()
                ckpt._shutdown._file._next = 0.0  # type: ignore[union-attr]  # a second has passed
                ckpt(state_of(2))
        except BaseException as error:  # noqa: BLE001  # a thread's edge
            raised.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert "signals are not watched" in caplog.text
    assert [type(error) for error in raised] == [SystemExit]
    assert jct.StepManager(tmp_path / "run").steps == [1, 2]


class LoopError(Exception):
    """The error of a loop."""


def fail_when_asked(directory: Path, error: BaseException, taken: bool, data: Any, **options: Any) -> None:
    """Run a loop that receives a signal in update 3, and fails there before or after it has taken its batch."""
    with callback(directory, **options) as ckpt:
        _, data = ckpt.resume(state_of(0), data)
        for step in ckpt.steps(50):
            if step == 3:
                send()
                if taken:
                    next(data)
                raise error
            next(data)
            ckpt(state_of(step + 1))


def range_iterator() -> Any:
    grain = pytest.importorskip("grain")
    return iter(grain.MapDataset.range(100).to_iter_dataset())


@pytest.mark.parametrize("taken", [False, True])
def test_error_after_a_request_saves_the_last_update(
    tmp_path: Path, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = LoopError()
    with pytest.raises(SystemExit) as caught:
        fail_when_asked(tmp_path, error, taken, range_iterator())
    assert (caught.value.code, caught.value.__cause__) == (75, error)
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)
    manager, data = jct.StepManager(tmp_path), range_iterator()
    restored = manager.restore({"state": state_of(0), "data": data})
    assert (manager.steps, step_of(restored), next(data)) == ([3], 3, 3)
    assert manager.history.events()[-1]["how"] == "preempted"


@pytest.mark.parametrize("taken", [False, True])
def test_error_after_a_request_saves_the_fingerprint(tmp_path: Path, taken: bool) -> None:
    with pytest.raises(SystemExit):
        fail_when_asked(tmp_path, LoopError(), taken, range_iterator(), fingerprint="v1")
    assert jct.StepManager(tmp_path).load({"data": None}, 3)["data"]["fingerprint"] == "v1"


def test_error_after_request_saves_position_in_custom_loop(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), range_iterator())
        for batch in data:
            if batch == 2:
                send()
                raise LoopError
            ckpt(state_of(batch + 1))
    data = range_iterator()
    jct.StepManager(tmp_path).restore({"state": state_of(0), "data": data})
    assert next(data) == 2


def test_error_after_request_may_raise_preempted(tmp_path: Path) -> None:
    with pytest.raises(jct.Preempted) as caught:
        fail_when_asked(tmp_path, LoopError(), False, range_iterator(), on_preemption="raise")
    assert (caught.value.step, type(caught.value.__cause__)) == (3, LoopError)


def test_exit_after_request_keeps_its_code_and_saves(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        fail_when_asked(tmp_path, SystemExit(3), True, range_iterator())
    assert caught.value.code == 3
    assert jct.StepManager(tmp_path).steps == [3]


def test_interrupt_after_a_request_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(5):
            ckpt(state_of(step + 1))
            send()
            raise KeyboardInterrupt
    assert jct.StepManager(tmp_path).steps == []


def test_error_after_request_without_updates_exits(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught, callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0), range_iterator())
        send()
        raise LoopError
    assert caught.value.code == 75
    assert jct.StepManager(tmp_path).steps == []


def test_iterator_that_may_have_moved_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        fail_when_asked(tmp_path, LoopError(), True, Counter(), save_interval_steps=2)
    assert caught.value.code == 75
    check_saved(tmp_path, 2)
    assert "step 3 is not saved" in caplog.text


def test_state_donated_to_failed_update_is_not_saved(tmp_path: Path) -> None:
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    with pytest.raises(SystemExit) as caught, callback(tmp_path, save_interval_steps=2) as ckpt:
        state = ckpt.resume(state_of(0))
        for step in ckpt.steps(50):
            update(state)
            if step == 3:
                send()
                raise LoopError
            ckpt(state := state_of(step + 1))
    assert caught.value.code == 75
    assert jct.StepManager(tmp_path).steps == [2]


def test_nnx_objects_are_saved_until_next_batch(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    for taken, steps in ((False, [2, 3]), (True, [2])):
        model, directory = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path / str(taken)
        with pytest.raises(SystemExit) as caught, callback(directory, save_interval_steps=2) as ckpt:
            _, data = ckpt.resume(model, range_iterator())
            for step in ckpt.steps(50):
                if step == 3:
                    send()
                    if taken:
                        next(data)
                    raise LoopError
                model.bias[...] += next(data)
                ckpt()
        assert caught.value.code == 75
        assert jct.StepManager(directory).steps == steps


def test_error_after_loop_was_left_keeps_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught, callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(50):
            next(data)
            if step == 1:
                send()
            ckpt(state_of(step + 1))
        raise LoopError  # as of an evaluation, whose workers are gone
    assert caught.value.code == 75
    check_saved(tmp_path, 2)
