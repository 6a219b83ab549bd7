"""CheckpointCallback: resumes, saves what is due, and leaves the last step saved, exactly once."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend, RefusingBackend, callback_on
from tests.support.runs import (
    Counter,
    files_below,
    flip_a_payload_byte,
    made_run,
    save_steps,
    state_of,
    step_of,
    step_path,
)


def callback(directory: Path, interval: int = 100, **options: Any) -> jct.CheckpointCallback:
    return jct.CheckpointCallback(str(directory), save_interval_steps=interval, **options)


def train(
    directory: Path, num_steps: int, interval: int = 100, stop_at: int | None = None, **options: Any
) -> list[int]:
    """Run a whole loop, which raises at `stop_at`, and return the steps that it did."""
    done = []
    with callback(directory, interval, **options) as ckpt:
        state, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(num_steps):
            assert next(data) == step
            assert int(state["step"]) == step
            if step == stop_at:
                raise ValueError("the loop's own error")
            state = state_of(step + 1)
            ckpt(state)
            done.append(step)
    return done


def saves(directory: Path) -> list[tuple[int, str]]:
    events = jct.StepManager(directory).history.events()
    return [(event["step"], event["reason"]) for event in events if event["event"] == "save"]


def test_last_step_is_saved_despite_busy_disk(tmp_path: Path) -> None:
    """In a loop over the data the position is a later one as soon as the next batch is taken."""
    backend = HoldingBackend("rename", "step-0000000002")
    with callback_on(backend, tmp_path, save_interval_steps=2, if_busy="skip") as ckpt:
        state, data = ckpt.resume(state_of(0), Counter())
        for _, step in zip(data, ckpt.steps(4), strict=False):
            state = state_of(step + 1)
            if step == 3:
                backend.go.set()
            result = ckpt(state)
        assert result.saved
    assert position_of(tmp_path, 4) == 4


def test_position_under_another_fingerprint_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 3, fingerprint="v1 batch=32")
    with pytest.raises(jct.IteratorStateError, match=r"'data': .*'v1 batch=32', found 'v2'"):
        train(tmp_path, 6, fingerprint="v2")
    assert train(tmp_path, 4, fingerprint="v1 batch=32") == [3]
    assert train(tmp_path, 5) == [4]  # without a fingerprint nothing is compared
    with callback(tmp_path, fingerprint="v2") as ckpt:
        assert int(ckpt.resume(state_of(0))["step"]) == 5  # nor without a data iterator
    with callback(tmp_path / "b", fingerprint="v1") as ckpt:
        ckpt.resume(state_of(0), Counter(), tracker=Counter())
        ckpt(state_of(1))
    with callback(tmp_path / "b", fingerprint="v2") as ckpt:
        ckpt.resume(state_of(0), tracker=Counter())


def position_of(directory: Path, step: int) -> int:
    return int(jct.StepManager(directory).restore({"data": Counter()}, step=step)["data"].position)


def test_second_run_of_a_loop_resumes(tmp_path: Path) -> None:
    assert train(tmp_path, 4) == [0, 1, 2, 3]
    assert train(tmp_path, 7) == [4, 5, 6]
    assert train(tmp_path, 7) == []
    assert jct.StepManager(tmp_path).steps == [4, 7]


def test_the_last_step_is_saved_exactly_once(tmp_path: Path) -> None:
    train(tmp_path / "due", 6, interval=3)
    assert saves(tmp_path / "due") == [(3, "FixedIntervalPolicy(interval=3)"), (6, "FixedIntervalPolicy(interval=3)")]
    train(tmp_path / "not-due", 7, interval=3)
    assert saves(tmp_path / "not-due")[1:] == [(6, "FixedIntervalPolicy(interval=3)"), (7, "end of the loop")]


@pytest.mark.parametrize(
    ("labels", "interval", "due"),
    [
        (range(8, 81, 8), 20, [24, 40, 64, 80]),
        (range(1, 62, 10), 10, [11, 21, 31, 41, 51, 61]),
        (range(1, 62, 10), 25, [31, 51]),
        ([3, 4, 9, 10, 11, 30], 5, [9, 10, 30]),
        (range(1, 8), 3, [3, 6]),
    ],
)
def test_labels_past_an_interval_are_saved(
    labels: Sequence[int], interval: int, due: list[int], tmp_path: Path
) -> None:
    for start in range(0, len(labels), 4):  # a process for each four of them
        with callback(tmp_path, interval=interval, save_on_exit=False) as ckpt:
            ckpt.resume(state_of(0))
            for label in labels[start : start + 4]:
                assert ckpt(state_of(label), step=label).saved == (label in due)
    assert jct.StepManager(tmp_path).steps == due


def test_labels_past_an_interval_are_not_temporary(tmp_path: Path) -> None:
    with callback(tmp_path, interval=20, temporary_interval_secs=1e-6, save_on_exit=False) as ckpt:
        ckpt.resume(state_of(0))
        for label in range(8, 49, 8):
            ckpt(state_of(label), step=label)
    assert jct.StepManager(tmp_path).steps == [24, 40, 48]


def test_hook_saves_labels_past_an_interval(tmp_path: Path) -> None:
    with callback(tmp_path, interval=5, save_on_exit=False) as ckpt:
        state = ckpt.resume(state_of(0))
        hook = ckpt.as_hook(lambda: state)
        assert [step for step in range(1, 31) if step % 3 == 0 and hook(step)] == [6, 12, 15, 21, 27, 30]


def test_nothing_is_saved_right_after_a_resume(tmp_path: Path) -> None:
    made_run(tmp_path, 10)
    before = files_below(tmp_path)
    with callback(tmp_path, interval=10) as ckpt:
        ckpt.resume(state_of(0))
        assert list(ckpt.steps(10)) == []
    with callback(tmp_path, interval=10) as ckpt:
        state = ckpt.resume(state_of(0))
        assert ckpt(state, step=10).reason == "not due"
        with pytest.raises(jct.SettingsError, match="save_now: expected a completed update"):
            callback(tmp_path).save_now()
        assert ckpt.save_now().reason == "step 10 is already saved"
    assert files_below(tmp_path) == before


def test_save_on_exit_can_be_disabled(tmp_path: Path) -> None:
    train(tmp_path, 7, interval=3, save_on_exit=False)
    assert jct.StepManager(tmp_path).steps == [3, 6]


def test_step_0_is_saved_only_in_fresh_run(tmp_path: Path) -> None:
    train(tmp_path, 2, save_initial=True)
    assert saves(tmp_path) == [(0, "initial"), (2, "end of the loop")]
    assert position_of(tmp_path, 0) == 0
    train(tmp_path, 3, save_initial=True)
    assert [step for step, _ in saves(tmp_path)] == [0, 2, 3]


def test_loop_error_is_raised_without_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the loop's own error") as caught:
        train(tmp_path, 9, interval=3, stop_at=5)
    assert getattr(caught.value, "__notes__", []) == []
    assert jct.StepManager(tmp_path).steps == [3]
    assert train(tmp_path, 9) == [3, 4, 5, 6, 7, 8]


def test_a_failing_save_ends_the_loop_loudly(tmp_path: Path) -> None:
    ckpt = callback_on(RefusingBackend("create", "step-0000000002", errno.EIO, 1), tmp_path, save_interval_steps=1)
    done = []
    with pytest.raises(jct.StorageError, match="refused to create"), ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(50):
            ckpt(state_of(step + 1))
            done.append(step)
    assert done == [0, 1]
    assert jct.StepManager(tmp_path).steps == [1, 3], "the save of the call that raised had started"


def test_break_after_reported_update_saves_it(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(10):
            next(data)
            ckpt(state_of(step + 1))
            if step == 3:
                break
    assert saves(tmp_path) == [(4, "end of the loop")]
    assert position_of(tmp_path, 4) == 4


def test_break_before_report_saves_no_wrong_position(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with callback(tmp_path, interval=2) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(10):
            next(data)
            if step == 3:
                ckpt.wait_until_finished()
                break
            ckpt(state_of(step + 1))
    assert "step 3 is not saved" in caplog.text
    assert "the last saved step is 2" in caplog.text
    assert jct.StepManager(tmp_path).steps == [2]
    assert position_of(tmp_path, 2) == 2


@pytest.mark.parametrize("stops", [(3,), (0, 1), (3, 3, 5)])
def test_rerun_loop_repeats_the_interrupted_update(stops: tuple[int, ...], tmp_path: Path) -> None:
    with callback(tmp_path, interval=1) as ckpt:
        ckpt.resume(state_of(0))
        done = []
        for stop in (*stops, None):
            with contextlib.suppress(KeyboardInterrupt):
                for step in ckpt.steps(7):
                    if step == stop:
                        raise KeyboardInterrupt
                    done.append(step)
                    ckpt(state_of(len(done)))
            assert ckpt.completed_steps == len(done)
    assert done == list(range(7))
    assert jct.StepManager(tmp_path).steps == list(range(1, 8))


def test_finished_loop_saves_no_interrupted_position(tmp_path: Path) -> None:
    with callback(tmp_path, interval=100) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        with contextlib.suppress(KeyboardInterrupt):
            for step in ckpt.steps(7):
                next(data)
                if step == 3:
                    raise KeyboardInterrupt
                ckpt(state_of(step + 1))
        assert list(ckpt.steps(3)) == []
    assert jct.StepManager(tmp_path).steps == []


def test_custom_loop_counts_its_calls(tmp_path: Path) -> None:
    with callback(tmp_path, interval=2) as ckpt:
        state = ckpt.resume(state_of(0))
        for _ in range(3):
            state = state_of(int(state["step"]) + 1)
            ckpt(state)
        assert ckpt.completed_steps == 3
    assert jct.StepManager(tmp_path).steps == [2, 3]
    with callback(tmp_path, interval=2) as ckpt:
        state = ckpt.resume(state_of(0))
        ckpt(state_of(4))
        assert ckpt.completed_steps == 4
    assert step_of(jct.StepManager(tmp_path).restore()) == 4


def test_custom_loop_may_pass_its_step(tmp_path: Path) -> None:
    with callback(tmp_path, interval=10) as ckpt:
        ckpt.resume(state_of(0))
        saved = {step: ckpt(state_of(step), step=step).saved for step in (5, 10, 15, 20)}
        with pytest.raises(jct.SettingsError, match="expected a whole number"):
            ckpt(state_of(20), step=20.0)  # type: ignore[arg-type]  # what is refused
    assert saved == {5: False, 10: True, 15: False, 20: True}


class Untouchable:
    """A value that must not be read."""

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise AssertionError("a device value was read")

    def __float__(self) -> float:
        raise AssertionError("a metric was read")

    def item(self) -> float:
        raise AssertionError("a metric was read")


def test_a_call_that_is_not_due_reads_nothing(tmp_path: Path) -> None:
    with callback(tmp_path, save_interval_secs=1000.0, keep_latest=3, save_on_exit=False) as ckpt:
        ckpt.resume(state_of(0))
        untouchable = {"w": Untouchable()}
        for step in ckpt.steps(5):
            result = ckpt(untouchable, metrics={"loss": Untouchable()}, more=Untouchable())
            assert (result.saved, step) == (False, ckpt.completed_steps - 1)
        assert not list(tmp_path.glob("*step-*"))


def test_call_that_is_not_due_touches_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with callback(tmp_path, interval=6, keep_latest=3, save_on_exit=False) as ckpt:
        ckpt.resume(state_of(0))
        for _ in ckpt.steps(2):
            ckpt(state_of(1))
        ckpt.wait_until_finished()
        with monkeypatch.context() as patch:
            for name in ("list", "open", "create", "append"):
                patch.setattr(ckpt.manager._run.backend, name, None, raising=False)
            for _ in range(3):
                ckpt(state_of(1), step=4)
        assert ckpt(state_of(6), step=6).saved


def test_policies_that_decide_by_metrics_read_them(tmp_path: Path) -> None:
    policy = jct.ImprovementPolicy("loss", "min")
    with jct.CheckpointCallback(str(tmp_path), save_policy=policy, keep_best=1, best_metric="loss") as ckpt:
        ckpt.resume(state_of(0))
        losses = [0.5, 0.7, 0.4, float("nan"), 0.4, 0.3]
        saved = [ckpt(state_of(n), metrics={"loss": jnp.float32(loss)}).saved for n, loss in enumerate(losses, 1)]
        assert saved == [True, False, True, False, False, True]
        ckpt.wait_until_finished()
        assert ckpt.manager.best("loss") == 6
    assert jct.StepManager(tmp_path).steps == [6]


def test_disabled_callback_does_nothing_and_loop_is_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, 3, enabled=False) == [0, 1, 2]
    assert not run.exists()
    ckpt = callback(run, enabled=False)
    assert (ckpt(state_of(1)).reason, ckpt.save_now().reason, ckpt.poll()) == ("disabled", "disabled", False)
    assert (ckpt.should_save(100), ckpt.latest_step(), ckpt.save(100, state_of(1), force=True)) == (False, None, False)


def test_save_now_saves_the_last_completed_update_once(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(4):
            next(data)
            if step == 3:
                with pytest.raises(jct.SettingsError, match="save_now: update 4 is running"):
                    ckpt.save_now()
            ckpt(state_of(step + 1))
            if step == 1:
                assert ckpt.save_now().saved
                assert ckpt.save_now().reason == "step 2 is already saved"
    assert saves(tmp_path) == [(2, "save_now"), (4, "end of the loop")]
    assert position_of(tmp_path, 2) == 2


def test_more_checkpointables_are_saved_and_restored_by_name(tmp_path: Path) -> None:
    notes = jct.JsonValue({"tokens": 5})
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0), Counter(), notes=notes)
        ckpt(state_of(1), notes=jct.JsonValue({"tokens": 10}))
    with callback(tmp_path) as ckpt:
        state, data, found = ckpt.resume(state_of(0), Counter(), notes=notes)
        assert (int(state["step"]), data.position, found.value) == (1, 0, {"tokens": 10})
        ckpt(state_of(2))
    assert jct.StepManager(tmp_path).restore({"notes": notes})["notes"].value == {"tokens": 10}


def test_nnx_objects_are_restored_in_place(tmp_path: Path) -> None:
    def made(seed: int) -> nnx.Module:
        return nnx.Linear(3, 2, rngs=nnx.Rngs(seed))

    model = made(0)
    with callback(tmp_path) as ckpt:
        assert ckpt.resume(model) is model
        for _ in ckpt.steps(3):
            model.kernel[...] = model.kernel[...] + 1.0
            ckpt()
    other = made(1)
    assert not np.array_equal(other.kernel[...], model.kernel[...])
    with callback(tmp_path) as ckpt:
        assert ckpt.resume(other) is other
        assert ckpt.completed_steps == 3
    np.testing.assert_array_equal(np.asarray(other.kernel[...]), np.asarray(model.kernel[...]))


def test_damaged_step_is_skipped_and_saved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 6, interval=3)
    flip_a_payload_byte(step_path(tmp_path, 6))
    assert train(tmp_path, 6, interval=3) == [3, 4, 5]
    assert "step 6 cannot be restored" in caplog.text
    assert step_of(jct.StepManager(tmp_path).restore({"state": state_of(0)})) == 6
    assert position_of(tmp_path, 6) == 6


def test_run_of_damaged_steps_does_not_restart(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_payload_byte(step_path(tmp_path, step))
    before = files_below(tmp_path)
    with pytest.raises(jct.CorruptCheckpointError, match="none of 2 committed steps"), callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
    assert files_below(tmp_path) == before


def test_init_from_is_used_only_in_fresh_run(tmp_path: Path) -> None:
    jct.save(tmp_path / "pretrained", state_of(0) | {"w": jnp.full(3000, 7.0)})
    for expected in (7.0, 8.0):
        with callback(tmp_path / "run", init_from=str(tmp_path / "pretrained")) as ckpt:
            state = ckpt.resume(state_of(0))
            assert float(state["w"][0]) == expected
            for _ in ckpt.steps(1):
                ckpt({**state, "w": state["w"] + 1})


def test_resume_is_refused_while_another_job_runs(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as other:
        save_steps(other, 1)
        ckpt = callback(tmp_path)
        for _ in range(2):
            with pytest.raises(jct.DirectoryLockedError, match="owned by this process"):
                ckpt.resume(state_of(0))
    ckpt.close()


def test_interrupted_cell_says_to_close_callback(tmp_path: Path) -> None:
    made = list[jct.CheckpointCallback]()

    def cell() -> None:
        made.append(callback(tmp_path, 1))
        made[-1].resume(state_of(0))
        for step in made[-1].steps(3):
            made[-1](state_of(step + 1))
            if step == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:  # a notebook keeps the traceback, and so the callback
        cell()
    with pytest.raises(jct.DirectoryLockedError, match=r"call close\(\)"):
        cell()
    made[0].close()
    cell()
    assert made[-1].completed_steps == 3
    made[-1].close()
    del kept


def test_closed_callback_refuses_calls(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt(state_of(1))
    with pytest.raises(jct.SettingsError, match="closed"):
        ckpt.resume(state_of(0))
    with pytest.raises(jct.SettingsError, match="closed"):
        ckpt(state_of(100), step=100)


def test_reported_state_may_be_donated_at_once(tmp_path: Path) -> None:
    step_fn = jax.jit(lambda state: {"w": state["w"] + 1, "step": state["step"] + 1}, donate_argnums=0)
    with callback(tmp_path, interval=1) as ckpt:
        state = ckpt.resume(state_of(0))
        for _ in ckpt.steps(20):
            state = step_fn(state)
            ckpt(state)
    manager = jct.StepManager(tmp_path)
    assert [step_of(manager.restore(step=step)) for step in manager.steps] == list(range(1, 21))


def test_quiet_run_logs_only_to_its_own_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    train(tmp_path, 3, interval=1)
    ours = [record for record in caplog.records if record.name.startswith("jaxckpt")]
    assert {record.name for record in ours} == {"jaxckpt_train"}
    assert {record.levelname for record in ours} <= {"DEBUG", "INFO"}


def test_each_committed_save_is_one_line_of_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path, 3, interval=1)
    train(tmp_path, 5, interval=2)
    lines = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    saved = [found for line in lines if (found := re.fullmatch(r"saved step (\d+) in ([\d.e-]+) s \((.+)\)", line))]
    assert [int(found[1]) for found in saved] == [1, 2, 3, 4, 5]
    assert all(0 < float(found[2]) < 600 for found in saved)
    assert {found[3].split()[1] for found in saved} == {"MiB"}
    rest = [line for line in lines if not line.startswith("saved") and " waits, " not in line]
    assert rest == [f"resumed from step 3 of {tmp_path}"]
