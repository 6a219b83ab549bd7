"""The owner sets a damaged step aside: its files stay, it is no longer listed, and its number is free again."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import (
    damaged,
    files_below,
    flip_a_payload_byte,
    made_run,
    number_of,
    remove_tree,
    save_steps,
    segment_of,
    state_of,
    step_of,
    step_path,
)


def step_names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if "step-" in path.name)


def owned_restore(run: Path, **options: Any) -> int:
    """The step that an owner restores."""
    with jct.StepManager(run, **options) as manager:
        manager.own()
        return step_of(manager.restore())


@damaged
def test_owner_sets_damaged_step_aside_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], file: str
) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    damage(step_path(run, 3))
    before = files_below(step_path(run, 3))
    with jct.StepManager(run) as manager:
        manager.own()
        assert step_of(manager.restore()) == 2
        assert (manager.steps, manager.latest) == ([1, 2], 2)
        (event,) = [event for event in manager.history.events() if event["event"] == "set_aside"]
        assert (event["step"], event["name"]) == (3, step_path(run, 3).name)
        assert file in event["problem"]
    assert files_below(step_path(run, 3)) == before
    assert jct.StepManager(run).steps == [1, 2]
    assert "step 3 is set aside" in caplog.text


def test_next_process_skips_damaged_step_unread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    assert owned_restore(run) == 1
    caplog.clear()
    backend = RefusingBackend("open", f"{step_path(run, 2).name}/state", errno.EACCES, times=1000)
    assert owned_restore(run, backend=backend) == 1
    assert caplog.text == ""


def test_damaged_number_is_saved_under_next_generation(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1)
    for _ in range(3):
        with jct.StepManager(run) as manager:
            save_steps(manager, 2)
        newest = max(name for name in step_names(run) if "0002" in name)
        flip_a_payload_byte(run / newest)
        assert owned_restore(run) == 1
    assert step_names(run) == ["step-0000000001", "step-0000000002", "step-0000000002.g1", "step-0000000002.g2"]
    assert jct.StepManager(run).steps == [1]


def test_retention_never_deletes_damaged_steps(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    damaged_step = step_path(run, 2)
    flip_a_payload_byte(damaged_step)
    before = files_below(damaged_step)
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        manager.own()
        manager.restore()
        save_steps(manager, 2, 3, 4)
    assert files_below(damaged_step) == before
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 5)
        assert manager.steps == [5]
    assert files_below(damaged_step) == before


def test_reader_sets_aside_on_becoming_owner(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    flip_a_payload_byte(step_path(run, 3))
    with jct.StepManager(run) as manager:
        assert step_of(manager.restore()) == 2
        assert not (run / "record").exists()
        save_steps(manager, 3)
        assert manager.latest == step_of(manager.restore()) == 3
    assert [number_of(run / name) for name in step_names(run)] == [1, 2, 3, 3]
    assert jct.StepManager(run).steps == [1, 2, 3]


def test_damage_report_does_not_apply_to_newer_save(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    with jct.StepManager(run) as late:
        assert step_of(late.restore()) == 1
        shutil.rmtree(step_path(run, 2))
        made_run(run, 2)
        late.own()
        assert (late.steps, late.damaged) == ([1, 2], [])
        assert step_of(late.restore(step=2)) == 2


def test_unreadable_step_is_not_set_aside(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    backend = RefusingBackend("open", f"{step_path(run, 2).name}/state", errno.EIO, times=2)
    assert owned_restore(run, backend=backend) == 1
    assert step_of(jct.StepManager(run).restore()) == 2


def test_failed_read_is_retried_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1, 2)
    backend = RefusingBackend("open", f"{step_path(run, 2).name}/state", errno.EIO, times=1)
    assert owned_restore(run, backend=backend) == 2
    assert "step 2 was intact" in caplog.text
    assert "[Errno 5]" in caplog.text


class BadMemory(LocalBackend):
    """Flips one bit of the first read of a segment; the file is intact."""

    def __init__(self) -> None:
        self.flips = 1

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source: Any = super().open(directory, name, direct=direct)
        read = source.read_into

        def read_into(offset: int, data: np.ndarray, needed: int) -> None:
            read(offset, data, needed)
            if self.flips and name.endswith(".safetensors") and offset > 0:
                self.flips -= 1
                data[0] ^= 1

        source.read_into = read_into
        return source


def test_transient_bit_flip_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, backend = made_run(tmp_path, 1, 2), BadMemory()
    assert owned_restore(run, backend=backend) == 2
    assert backend.flips == 0
    assert "step 2 was intact" in caplog.text
    assert jct.StepManager(run).steps == [1, 2]


def test_nothing_is_set_aside_without_intact_step(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_payload_byte(step_path(run, step))
    with jct.StepManager(run) as manager:
        manager.own()
        with pytest.raises(jct.CorruptCheckpointError, match="none of 2 committed steps"):
            manager.restore()
        assert manager.steps == [1, 2]
    assert not (run / "record").exists()


def test_run_with_only_damaged_steps_raises(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    assert owned_restore(run) == 1
    shutil.rmtree(step_path(run, 1))
    with (
        jct.CheckpointCallback(run) as ckpt,
        pytest.raises(jct.CorruptCheckpointError, match="none of 1 committed steps"),
    ):
        ckpt.resume(state_of(0))


def test_refused_record_does_not_stop_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    backend = RefusingBackend("swap_record", "/record", errno.EROFS, times=1000)
    with jct.StepManager(run, backend=backend) as manager:
        manager.own()
        assert step_of(manager.restore()) == 1
        assert "step 2 could not be set aside" in caplog.text
        save_steps(manager, 3)
        assert manager.latest == 3


def test_repaired_step_is_restored_by_number(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    sound = segment_of(step_path(run, 2)).read_bytes()
    flip_a_payload_byte(step_path(run, 2))
    assert owned_restore(run) == 1
    with jct.StepManager(run) as manager:
        manager.own()
        with pytest.raises(jct.CorruptCheckpointError, match="step 2 cannot be restored"):
            manager.restore(step=2)
    segment_of(step_path(run, 2)).write_bytes(sound)
    reader = jct.StepManager(run)
    assert (reader.steps, reader.damaged) == ([1], [2])
    with jct.StepManager(run) as manager:
        manager.own()
        assert step_of(manager.restore(step=2)) == 2
        assert (manager.steps, manager.damaged) == ([1, 2], [])
    assert jct.StepManager(run).latest == 2


def test_partial_restore_keeps_damage_report(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"state": state_of(step), "data": jct.JsonValue(step)})
            manager.wait()
    flip_a_payload_byte(step_path(tmp_path, 2))
    assert owned_restore(tmp_path) == 1
    with jct.StepManager(tmp_path) as manager:
        manager.own()
        assert manager.restore({"data": None}, step=2)["data"].value == 2
        assert manager.damaged == [2]
    assert jct.StepManager(tmp_path).steps == [1]


def test_recopied_step_lets_run_continue(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    shutil.copytree(step_path(run, 2), tmp_path / "copy")
    flip_a_payload_byte(step_path(run, 2))
    assert owned_restore(run) == 1
    shutil.rmtree(step_path(run, 1))
    with pytest.raises(jct.CorruptCheckpointError, match="none of 1 committed steps"):
        jct.StepManager(run).restore()
    shutil.rmtree(step_path(run, 2))
    shutil.copytree(tmp_path / "copy", step_path(run, 2))
    with jct.CheckpointCallback(run) as ckpt:
        ckpt.resume(state_of(0))
        assert ckpt.completed_steps == 2
    assert jct.StepManager(run).steps == [2]


def test_set_aside_step_with_damaged_manifest_stays(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    assert owned_restore(run) == 1
    damaged_step = step_path(run, 2)
    (damaged_step / "manifest.json").write_bytes(b"rotten")
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        save_steps(manager, 2, 3)
        assert (manager.steps, manager.damaged) == ([3], [2])
    assert (damaged_step / "manifest.json").read_bytes() == b"rotten"


def test_successful_restore_clears_damage_report(tmp_path: Path) -> None:
    """The step is still being copied to this place when it is read first."""
    run = made_run(tmp_path, 1, 2)
    sound = segment_of(step_path(run, 2)).read_bytes()
    segment_of(step_path(run, 2)).unlink()
    with jct.StepManager(run) as manager:
        assert step_of(manager.restore()) == 1
        segment_of(step_path(run, 2)).write_bytes(sound)
        assert step_of(manager.restore()) == 2
        save_steps(manager, 3)
        assert manager.steps == [1, 2, 3]


def test_unresumed_loop_on_damaged_run_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    assert owned_restore(run) == 1
    shutil.rmtree(step_path(run, 1))
    with jct.CheckpointCallback(run) as ckpt, pytest.raises(jct.CorruptCheckpointError, match="damaged"):
        ckpt({"w": jnp.zeros(3)}, step=1)


def test_damaged_newest_step_keeps_roll_back(tmp_path: Path) -> None:
    """The newest step, whose manifest records the roll-back, is the damaged one."""
    run = made_run(tmp_path, 1, 2, 3)
    with jct.StepManager(run) as manager:
        manager.restore(step=1)
        save_steps(manager, 10)
    flip_a_payload_byte(step_path(run, 10))
    assert owned_restore(run) == 1
    assert step_of(jct.StepManager(run).restore()) == 1


def test_training_resumes_before_damaged_step(tmp_path: Path) -> None:
    def train(updates: int) -> tuple[int, float]:
        with jct.CheckpointCallback(tmp_path, save_interval_steps=1) as ckpt:
            state = ckpt.resume({"w": jnp.zeros(3000)})
            begun = ckpt.completed_steps
            for _ in ckpt.steps(updates):
                state = {"w": state["w"] * 0.5 + 1.0}
                ckpt(state)
        return begun, float(state["w"][0])

    _, whole = train(5)
    remove_tree(tmp_path)
    train(3)
    flip_a_payload_byte(step_path(tmp_path, 3))
    assert train(5) == (2, whole)
    assert sorted(jct.verify(each).ok for each in tmp_path.glob("step-0000000003*")) == [False, True]


def test_metrics_of_damaged_step_are_not_inherited(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    with jct.StepManager(run) as manager:
        manager.attach_metrics(2, {"loss": 0.5})
    flip_a_payload_byte(step_path(run, 2))
    with jct.StepManager(run) as manager:
        manager.own()
        manager.restore()
        save_steps(manager, 2)
        assert manager.best("loss") is None
    assert jct.StepManager(run).best("loss") is None
