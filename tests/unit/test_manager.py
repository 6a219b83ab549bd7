"""StepManager: what it saves, refuses, waits for and reports."""

from __future__ import annotations

import datetime
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend
from tests.support.runs import START, Clock, made_run, save_steps, state_of, step_of, step_path

PHASES = ("decide_s", "snapshot_s", "stage_s", "write_s", "commit_s", "wait_s", "blocked_s")


def held(directory: Path, step: int, **options: Any) -> tuple[jct.StepManager, HoldingBackend]:
    """A manager whose save of a step is under way until `backend.go` is set."""
    backend = HoldingBackend("rename", f"step-{step:010d}")
    return jct.StepManager(directory, backend=backend, **options), backend


def test_a_label_is_the_number_of_completed_updates(tmp_path: Path) -> None:
    manager = jct.StepManager(made_run(tmp_path, 0, 1, 7))
    assert manager.steps == manager.all_steps() == [0, 1, 7]
    assert manager.latest == manager.latest_step() == 7
    assert [step_of(manager.restore(step=step)) for step in (0, 1, 7)] == [0, 1, 7]


def test_the_steps_are_listed_as_policies_see_them(tmp_path: Path) -> None:
    clock = Clock()
    with jct.StepManager(tmp_path, clock=clock) as manager:
        save_steps(manager, 5, metrics={"loss": 2.0})
        manager.restore(step=5)
        save_steps(manager, 7)
        manager.attach_metrics(5, {"accuracy": 0.5})
        manager.pin(7)
        assert [(info.step, info.metrics, info.pinned) for info in manager.infos] == [
            (5, {"loss": 2.0, "accuracy": 0.5}, False),
            (7, None, True),
        ]
        assert manager.infos[0].time < manager.infos[1].time <= clock.now


def test_save_result_gives_its_reason(tmp_path: Path) -> None:
    policy = jct.FixedIntervalPolicy(10)
    with jct.StepManager(tmp_path, save_decision_policy=policy) as manager:
        not_due = manager.save(9, {"state": state_of(9)})
        assert (not_due.saved, not_due.pending) == (False, None)
        assert not_due.reason.startswith("not due: ")
        due = manager.save(10, {"state": state_of(10)})
        assert (due.saved, due.reason) == (True, "FixedIntervalPolicy(interval=10)")
        assert due.pending is not None
        metadata = due.pending.wait()
        assert (metadata.step, metadata.path) == (10, str(step_path(tmp_path, 10)))
        assert manager.save(11, {"state": state_of(11)}, force=True).reason == "forced"
        manager.wait()
        assert manager.save(12, {"state": state_of(12)}, reason="an evaluation").reason == "an evaluation"
        manager.wait()
    assert manager.steps == [10, 11, 12]


def test_without_a_policy_every_call_saves(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        assert manager.save(1, {"state": state_of(1)}).reason.startswith("no save policy")


@pytest.mark.parametrize("step", [True, 1.0, "1", None])
def test_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(jct.SettingsError, match="expected a whole number"):
        jct.StepManager(tmp_path).save(step, {"state": state_of(1)})
    assert list(tmp_path.iterdir()) == []


def test_existing_step_is_refused_without_overwrite(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1, 2)
        with pytest.raises(jct.CheckpointExistsError, match="step 1 is committed already"):
            manager.save(1, {"state": state_of(5)})
        assert step_of(manager.restore(step=1)) == 1
        for content in (100, 200):
            manager.save(1, {"state": state_of(content)}, overwrite=True)
            manager.wait()
            assert step_of(manager.restore(step=1)) == content
            assert manager.steps == [1, 2]
            assert manager.latest == 1
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert names == ["step-0000000001.g2", "step-0000000002"]


def test_an_overwritten_step_stays_pinned(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 1)
        manager.pin(1)
        manager.save(1, {"state": state_of(100)}, overwrite=True)
        save_steps(manager, 2, 3)
        assert manager.steps == [1, 3]


def test_second_save_waits_for_first_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxckpt_train")
    manager, backend = held(tmp_path, 1)
    assert manager.save(1, {"state": state_of(1)}).saved
    assert backend.reached.wait(60)
    assert manager.is_saving_in_progress()
    done: list[jct.SaveResult] = []
    second = threading.Thread(target=lambda: done.append(manager.save(2, {"state": state_of(2)})))
    second.start()
    while "step 2 waits, because step 1 to" not in caplog.text:
        assert second.is_alive()
    observed_at = time.perf_counter()
    assert (manager.latest, done) == (None, [])
    at_least_s = time.perf_counter() - observed_at
    backend.go.set()
    second.join()
    assert done[0].saved
    manager.close()
    assert manager.steps == [1, 2]
    _, next_one = (event for event in manager.history.events() if event["event"] == "save")
    assert at_least_s <= next_one["wait_s"] <= next_one["blocked_s"]


def test_a_busy_manager_may_skip_and_reports_it(tmp_path: Path) -> None:
    manager, backend = held(tmp_path, 1, if_busy="skip")
    manager.save(1, {"state": state_of(1)})
    skipped = manager.save(2, {"state": state_of(2)})
    assert not skipped.saved
    assert skipped.reason.startswith(f"skipped: step 1 to {tmp_path} ")
    assert "if_busy is 'skip'" in skipped.reason
    backend.go.set()
    manager.wait()
    assert manager.save(3, {"state": state_of(3)}).saved
    manager.save(4, {"state": state_of(4)}, force=True)  # a forced save waits
    manager.close()
    assert manager.steps == [1, 3, 4]


def test_a_policy_knows_of_the_save_under_way(tmp_path: Path) -> None:
    manager, backend = held(tmp_path, 1, save_decision_policy=jct.ContinuousCheckpointingPolicy())
    assert manager.save(1, {"state": state_of(1)}).saved
    assert not manager.should_save(2)
    backend.go.set()
    manager.wait()
    assert manager.should_save(2)
    manager.close()


def test_policy_knows_metrics_of_save_under_way(tmp_path: Path) -> None:
    manager, backend = held(tmp_path, 1, save_decision_policy=jct.ImprovementPolicy("loss", "min"))
    assert manager.save(1, {"state": state_of(1)}, metrics={"loss": 1.0}).saved
    assert not manager.should_save(2, {"loss": 2.0})
    assert manager.should_save(2, {"loss": 0.5})
    backend.go.set()
    manager.close()


def test_metrics_are_kept_bit_for_bit(tmp_path: Path) -> None:
    metrics = {"loss": jnp.float32(0.1), "high": math.inf, "low": -math.inf, "bad": math.nan, "steps": 3}
    with jct.StepManager(tmp_path) as manager:
        manager.save(1, {"state": state_of(1)}, metrics=metrics)
        manager.wait()
        written = manager.metadata(1).metrics
    read = jct.StepManager(tmp_path).metadata().metrics
    for found in (written, read, jct.metadata(step_path(tmp_path, 1)).metrics):
        assert (found["loss"], found["high"], found["low"]) == (float(np.float32(0.1)), math.inf, -math.inf)
        assert math.isnan(found["bad"])
        assert found["steps"] == 3.0


def test_metrics_must_be_numbers(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager, pytest.raises(jct.SettingsError, match="metric 'loss'"):
        manager.save(1, {"state": state_of(1)}, metrics={"loss": "low"})
    assert [path.name for path in tmp_path.iterdir() if "step" in path.name] == []


def test_best_is_latest_of_equals_never_nan(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        for step, loss in ((1, 0.5), (2, math.nan), (3, 0.2), (4, 0.2), (5, 0.9), (6, -math.inf), (7, None)):
            save_steps(manager, step, metrics=None if loss is None else {"loss": loss})
        assert manager.best("loss") == 6
        assert manager.best("loss", mode="max") == 5
        assert manager.best("accuracy", "max") is None
        with pytest.raises(jct.SettingsError, match="accuracy"):
            manager.best("accuracy")
        with pytest.raises(jct.SettingsError, match='expected "min"'):
            manager.best("loss", mode="lowest")  # type: ignore[arg-type]  # what is refused
    assert jct.StepManager(tmp_path).best("loss") == 6


def test_metrics_can_come_later_and_count_then(tmp_path: Path) -> None:
    policy = jct.AnyPreservationPolicy([jct.LatestN(1), jct.BestN("accuracy", 1, "max")])
    with jct.StepManager(tmp_path, preservation_policy=policy) as manager:
        save_steps(manager, 1, metrics={"loss": 1.0})
        save_steps(manager, 2)
        assert manager.best("accuracy", "max") is None
        manager.attach_metrics(1, {"accuracy": jnp.float32(0.75), "bad": math.nan})
        manager.attach_metrics(2, {"accuracy": 0.5})
        assert manager.best("accuracy", mode="max") == 1
        with pytest.raises(jct.StepNotFoundError, match="step 9; committed: 1, 2"):
            manager.attach_metrics(9, {"accuracy": 0.5})
    with jct.StepManager(tmp_path, preservation_policy=policy) as manager:
        assert manager.best("accuracy", mode="max") == 1
        assert manager.best("bad") is None
        save_steps(manager, 3, metrics={"accuracy": 0.6})
        assert manager.steps == [1, 3]


def test_missing_step_cannot_be_pinned(tmp_path: Path) -> None:
    with (
        jct.StepManager(made_run(tmp_path, 1, 2)) as manager,
        pytest.raises(jct.StepNotFoundError, match="no committed step 9"),
    ):
        manager.pin(9)


def test_path_of_step_can_be_loaded_and_verified(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1, 2)
        manager.save(1, {"state": state_of(7)}, overwrite=True)
        manager.wait()
        assert [manager.path(step) for step in (1, 2, None)] == [
            f"{tmp_path}/step-0000000001.g1", f"{tmp_path}/step-0000000002", f"{tmp_path}/step-0000000001.g1"
        ]  # fmt: skip
        assert step_of({"state": jct.load(manager.path(1))}) == 7
        assert jct.verify(manager.path()).ok
        with pytest.raises(jct.StepNotFoundError, match="no committed step 3"):
            manager.path(3)


def test_custom_metadata_comes_back(tmp_path: Path) -> None:
    note = {"commit": "abc", "lr": [0.1, 0.01], "nothing": None}
    with jct.StepManager(tmp_path) as manager:
        manager.save(1, {"state": state_of(1)}, custom_metadata=note)
        manager.wait()
        assert manager.metadata(1).custom_metadata == note


def test_history_records_what_each_save_cost(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1)
        manager.restore()
        _, save, restore = manager.history.events()
    assert (save["event"], save["ok"], save["step"], save["name"]) == ("save", True, 1, step_path(tmp_path, 1).name)
    size = sum(file.stat().st_size for file in (step_path(tmp_path, 1) / "state").iterdir())
    assert save["bytes"] == size > 12004
    assert all(save[phase] >= 0 for phase in PHASES)
    assert save["blocked_s"] >= save["snapshot_s"] + save["stage_s"] + save["decide_s"]
    assert save["save_s"] >= save["decide_s"] + save["wait_s"] + save["write_s"] + save["commit_s"]
    assert save["bytes_per_s"] == pytest.approx(size / (save["write_s"] + save["commit_s"]), rel=0.01)
    assert datetime.datetime.fromisoformat(save["time"]).tzinfo is not None
    assert restore["event"] == "restore"


def test_history_keeps_metrics_of_deleted_steps(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 1, metrics={"loss": 0.5, "bad": math.nan})
        save_steps(manager, 2)
        recorded = [event.get("metrics") for event in manager.history.events() if event["event"] == "save"]
    assert recorded == [{"loss": 0.5, "bad": "nan"}, None]


def test_a_reader_sees_steps_as_they_are_committed(tmp_path: Path) -> None:
    reader = jct.StepManager(tmp_path)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2)) as owner:
        for step, seen in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
            save_steps(owner, step)
            owner._run._deleter.wait()
            assert (reader.steps, reader.latest) == (seen, step)
            assert step_of(reader.restore()) == step


def test_reader_does_not_see_an_unfinished_step(tmp_path: Path) -> None:
    manager, backend = held(tmp_path, 2)
    save_steps(manager, 1)
    manager.save(2, {"state": state_of(2)})
    assert backend.reached.wait(60)
    reader = jct.StepManager(tmp_path)
    assert (reader.latest, manager.latest, step_of(reader.restore())) == (1, 1, 1)
    backend.go.set()
    manager.close()
    assert reader.latest == 2


def test_two_managers_cannot_save_to_one_directory(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as first:
        save_steps(first, 1)
        second = jct.StepManager(tmp_path)
        for attempt in (second.own, lambda: second.save(2, {"state": state_of(2)}), lambda: second.pin(1)):
            with pytest.raises(jct.DirectoryLockedError, match="owned by this process"):
                attempt()
        save_steps(first, 2)
    with jct.StepManager(tmp_path) as third:
        save_steps(third, 3)


def test_short_wait_times_out_save_continues(tmp_path: Path) -> None:
    manager, backend = held(tmp_path, 1)
    manager.save(1, {"state": state_of(1)})
    with pytest.raises(jct.CheckpointTimeoutError, match=r"step 1 to .*after 0.01 s"):
        manager.wait(0.01)
    backend.go.set()
    manager.wait(60)
    assert manager.latest == 1
    manager.close()


def test_close_waits_for_the_save(tmp_path: Path) -> None:
    manager, backend = held(tmp_path, 1)
    manager.save(1, {"state": state_of(1)})
    closing = threading.Thread(target=manager.close)
    closing.start()
    assert backend.reached.wait(60)
    assert closing.is_alive()
    backend.go.set()
    closing.join()
    assert jct.StepManager(tmp_path).latest == 1
    manager.close()


def test_a_closed_manager_refuses_to_change_anything(tmp_path: Path) -> None:
    manager = jct.StepManager(made_run(tmp_path, 1))
    manager.close()
    for attempt in (
        lambda: manager.save(2, {"state": state_of(2)}),
        lambda: manager.pin(1),
        lambda: manager.attach_metrics(1, {"loss": 1.0}),
        manager.own,
    ):
        with pytest.raises(jct.SettingsError, match="this StepManager is closed"):
            attempt()
    assert manager.steps == [1]
    with jct.StepManager(tmp_path) as other:
        other.own()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"if_busy": "drop"}, "if_busy: .*found 'drop'"),
        ({"save_decision_policy": 5}, r"save_decision_policy: expected an object with should_save"),
        ({"preservation_policy": jct.LatestN}, "LatestN"),
        ({"save_decision_policy": jct.LatestN(1)}, r"LatestN\(n=1\)"),
    ],
)
def test_constructor_refuses_wrong_arguments(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(jct.SettingsError, match=match):
        jct.StepManager(tmp_path, **options)


def test_choice_may_be_text_of_numpy(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, if_busy=np.str_("skip")) as manager:  # type: ignore[arg-type]
        assert manager.save(1, {"state": state_of(1)}).saved


def test_passed_clock_is_used(tmp_path: Path) -> None:
    policy = jct.EverySecondsPolicy(150)
    with jct.StepManager(tmp_path, save_decision_policy=policy, clock=Clock()) as manager:
        assert [step for step in range(1, 6) if manager.save(step, {"state": state_of(step)}).saved][:1] == [3]
    created = datetime.datetime.fromisoformat(jct.metadata(step_path(tmp_path, 3)).created)
    assert START < created < START + datetime.timedelta(hours=1)


def test_paths_may_be_relative_or_start_with_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    made_run(Path("runs/a"), 1)
    assert jct.StepManager("~/runs/a").steps == [1]
    assert jct.StepManager(tmp_path / "runs" / "a").steps == [1]
