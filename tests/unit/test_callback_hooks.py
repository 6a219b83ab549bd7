"""The callback inside other people's loops: clu's hooks, Levanter's hooks, Orbax's manager."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxckpt_train as jct
from tests.support.runs import made_run, state_of, step_of


def callback(directory: Path) -> jct.CheckpointCallback:
    return jct.CheckpointCallback(str(directory), save_interval_steps=2)


def test_hook_is_called_with_number_of_completed_updates(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        current = [0]
        hook = ckpt.as_hook(lambda: state_of(current[0]))
        results = []
        for step in range(1, 6):
            current[0] = step
            results.append(hook(step, t=1.5))
    assert results == [False, True, False, True, False]
    assert jct.StepManager(tmp_path).steps == [2, 4, 5]


def test_hook_of_disabled_callback_saves_nothing(tmp_path: Path) -> None:
    with jct.CheckpointCallback(str(tmp_path), enabled=False) as ckpt:
        assert not ckpt.as_hook(lambda: state_of(1))(1)


def test_hook_counting_from_zero_saves_same_labels(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        current = [0]
        hook = ckpt.as_hook(lambda: state_of(current[0]), first_step=0)
        results = []
        for step in range(5):
            current[0] = step + 1
            results.append(hook(step))
    assert results == [False, True, False, True, False]
    manager = jct.StepManager(tmp_path)
    assert [(step, step_of(manager.restore(step=step))) for step in manager.steps] == [(2, 2), (4, 4), (5, 5)]


def test_off_by_one_hook_is_refused(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        with pytest.raises(jct.SettingsError, match=r"hook\(step\), with first_step=0.*at least 1, found 0"):
            ckpt.as_hook(lambda: state_of(1))(0)
        with pytest.raises(jct.SettingsError, match=r"first_step: .*0 to 1, found 2"):
            ckpt.as_hook(lambda: state_of(1), first_step=2)


def test_a_hook_records_the_metrics_of_its_update(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        losses = {1: 3.0, 2: 0.5}
        at = [0]
        hook = ckpt.as_hook(lambda: state_of(at[0]), get_metrics=lambda: {"loss": losses[at[0]]})
        for step in losses:
            at[0] = step
            hook(step)
        ckpt.wait_until_finished()
        assert ckpt.manager.metadata(2).metrics == {"loss": 0.5}


def test_levanter_hook_counts_from_zero(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in range(3):
            ckpt.on_step(SimpleNamespace(step=step, state=state_of(step + 1)))
        ckpt.on_step(SimpleNamespace(step=2, state=state_of(3)), force=True)
        assert ckpt.manager.settle() is None
        assert ckpt.manager.steps == [2, 3]
        assert step_of(ckpt.manager.restore()) == 3


def test_levanter_hook_saves_the_saveable_state(tmp_path: Path) -> None:
    trainable = SimpleNamespace(saveable_state=state_of(1), optimizer=print)
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        ckpt.on_step(SimpleNamespace(step=0, state=trainable), force=True)
        ckpt.wait_until_finished()
        assert step_of(ckpt.manager.restore()) == 1


def test_levanter_hook_may_repeat_last_step(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        for step in (0, 1, 2, 2):
            ckpt.on_step(SimpleNamespace(step=step, state=state_of(step + 1)))
    assert jct.StepManager(tmp_path).steps == [2, 3]


def test_callback_has_the_methods_of_orbax_manager(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        assert ckpt.latest_step() is None
        assert [ckpt.should_save(step) for step in (1, 2)] == [False, True]
        assert [ckpt.save(step, state_of(step)) for step in (1, 2, 3)] == [False, True, False]
        ckpt.wait_until_finished()
        assert ckpt.latest_step() == 2
        assert ckpt.save(3, state_of(3), metrics={"loss": 1.0}, force=True)
        assert not ckpt.save(3, state_of(3), force=True)
        ckpt.wait_until_finished()
        assert ckpt.latest_step() == 3
        assert step_of(ckpt.manager.restore(step=2)) == 2
        assert ckpt.manager.metadata(3).metrics == {"loss": 1.0}


def test_restored_step_is_not_saved_again(tmp_path: Path) -> None:
    with callback(made_run(tmp_path, 2)) as ckpt:
        ckpt.resume(state_of(0))
        assert not ckpt.save(2, state_of(2))
        assert ckpt.save(4, state_of(4))


def test_a_loop_that_calls_save_is_preempted_too(tmp_path: Path) -> None:
    notice = tmp_path / "leave"
    ckpt = jct.CheckpointCallback(
        str(tmp_path / "run"), save_interval_steps=100, notice_file=str(notice), on_preemption="raise"
    )
    with pytest.raises(jct.Preempted, match="step 1 is saved"), ckpt:
        ckpt.resume(state_of(0))
        notice.touch()
        ckpt.save(1, state_of(1))
        raise AssertionError("the loop went on")
    assert jct.StepManager(tmp_path / "run").steps == [1]


def reported_three(directory: Path) -> jct.CheckpointCallback:
    ckpt = jct.CheckpointCallback(str(directory), save_interval_steps=1)
    ckpt.resume(state_of(0))
    for step in (1, 2, 3):
        ckpt(state_of(step), step=step)
    return ckpt


@pytest.mark.parametrize(("step", "error"), [(2, jct.CheckpointExistsError), (0, jct.SettingsError)])
def test_lower_step_is_refused_with_a_remedy(tmp_path: Path, step: int, error: type[Exception]) -> None:
    with reported_three(tmp_path) as ckpt:
        with pytest.raises(error, match=f"above 3, .* found {step}: ") as caught:
            ckpt(state_of(step), step=step)
        assert "overwrite" not in str(caught.value)
        assert "a new directory" in str(caught.value)
        assert "jaxckpt_train.StepManager" in str(caught.value)
        ckpt(state_of(4), step=4)
    assert jct.StepManager(tmp_path).steps == [1, 2, 3, 4]


def test_backward_hook_step_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jct.CheckpointCallback(str(tmp_path), save_interval_steps=100) as ckpt:
        ckpt.resume(state_of(0))
        hook = ckpt.as_hook(lambda: state_of(1))
        for step in (1, 2, 2, 3):
            hook(step)
        assert caplog.messages == []
        hook(1)
        assert "update 1 after update 3" in caplog.messages[0]
        hook(0 + 1)
        hook(4)
        assert len(caplog.messages) == 1


def test_invalid_hook_arguments_are_refused(tmp_path: Path) -> None:
    with callback(tmp_path) as ckpt:
        ckpt.resume(state_of(0))
        with pytest.raises(jct.SettingsError, match=r"step: .*found 'x'"):
            ckpt.should_save("x")  # type: ignore[arg-type]
        with pytest.raises(jct.SettingsError, match=r"hook\(step\).*found 'x'"):
            ckpt.as_hook(lambda: state_of(1))("x")  # type: ignore[arg-type]
        with pytest.raises(jct.SettingsError, match=r"as_hook: get_state: .*an object of dict"):
            ckpt.as_hook(state_of(1))
        with pytest.raises(jct.SettingsError, match=r"get_metrics: .*an object of int"):
            ckpt.as_hook(lambda: state_of(1), get_metrics=5)
        with pytest.raises(jct.SettingsError, match=r"get_metrics: .*an object of dict"):
            ckpt.as_hook(lambda: state_of(1), get_metrics={})
        for info, message in (
            (5, "info: .*object of int"),
            (SimpleNamespace(step=1), "info: .*object of SimpleNamespace"),
            (SimpleNamespace(state=state_of(1)), "info: .*object of SimpleNamespace"),
            (SimpleNamespace(step="x", state=state_of(1)), "info.step: .*found 'x'"),
        ):
            with pytest.raises(jct.SettingsError, match=f"on_step: {message}"):
                ckpt.on_step(info)
    assert jct.StepManager(tmp_path).steps == []
