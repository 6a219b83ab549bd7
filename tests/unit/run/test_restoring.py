"""Restores of a run: the newest valid step, past damaged ones, and a step by its number."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt_train as jct
from jaxckpt_train.pytree import placing as device_put
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import (
    DAMAGE,
    Counter,
    damaged,
    files_below,
    flip_a_payload_byte,
    made_run,
    save_steps,
    state_of,
    step_of,
    step_path,
)


def test_the_newest_step_is_restored(tmp_path: Path) -> None:
    manager = jct.StepManager(made_run(tmp_path, 1, 2, 3))
    assert step_of(manager.restore()) == 3
    assert manager.restored_step == 3


def test_a_target_gets_back_its_own_types(tmp_path: Path) -> None:
    manager = jct.StepManager(made_run(tmp_path, 1))
    restored = manager.restore({"state": jax.eval_shape(lambda: state_of(0))})
    assert isinstance(restored["state"]["w"], jax.Array)
    assert step_of(restored) == 1


@damaged
def test_damaged_newest_step_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], file: str
) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    damage(step_path(run, 3))
    before = files_below(run)
    manager = jct.StepManager(run)
    assert step_of(manager.restore()) == 2
    assert manager.restored_step == 2
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.name == "jaxckpt_train"
    assert "step 3 cannot be restored" in warning.getMessage()
    assert str(step_path(run, 3)) in warning.getMessage()
    assert file in warning.getMessage()
    manager.close()
    assert files_below(run) == before


def test_each_skipped_damaged_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1, 2, 3, 4)
    names = [step_path(run, step).name for step in (4, 3, 2)]
    for (damage, _), step in zip(DAMAGE.values(), (2, 3, 4), strict=False):
        damage(step_path(run, step))
    with jct.StepManager(run) as manager:
        manager.own()
        assert step_of(manager.restore()) == 1
        assert manager.history.events()[-1]["skipped"] == names
    assert [int(step) for step in re.findall(r"step (\d) cannot be restored", caplog.text)] == [4, 3, 2]


@damaged
def test_all_damaged_steps_raise_and_write_nothing(tmp_path: Path, damage: Callable[[Path], None], file: str) -> None:
    run = made_run(tmp_path, 1, 2)
    for step in (1, 2):
        damage(step_path(run, step))
    before = files_below(run)
    with pytest.raises(jct.CorruptCheckpointError, match="none of 2 committed steps") as caught:
        jct.StepManager(run).restore()
    for step in (1, 2):
        assert f"step {step}: " in str(caught.value)
    assert str(caught.value).count(file) >= 2
    assert files_below(run) == before


def test_an_empty_run_has_nothing_to_restore(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nothing"):
        manager = jct.StepManager(directory)
        assert (manager.latest, manager.steps) == (None, [])
        with pytest.raises(jct.StepNotFoundError, match="has no committed step"):
            manager.restore()


def test_step_is_restored_by_number(tmp_path: Path) -> None:
    manager = jct.StepManager(made_run(tmp_path, 10, 20, 30))
    assert step_of(manager.restore(step=20)) == 20
    with pytest.raises(jct.StepNotFoundError, match="step 25; committed: 10, 20, 30"):
        manager.restore(step=25)
    with pytest.raises(jct.StepNotFoundError, match="step 25; committed: none"):
        jct.StepManager(tmp_path / "nothing").restore(step=25)
    with pytest.raises(jct.SettingsError, match="expected a whole number"):
        manager.restore(step=20.0)  # type: ignore[arg-type]  # what is refused


def test_damaged_step_by_number_has_no_fallback(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    with pytest.raises(jct.CorruptCheckpointError, match="step 2 cannot be restored"):
        jct.StepManager(run).restore(step=2)


def test_newer_format_version_is_not_skipped(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    for name in ("COMMIT", "manifest.json"):
        file = step_path(run, 2) / name
        file.write_text(json.dumps(json.loads(file.read_bytes()) | {"format_version": 3, "more": [1]}))
    with pytest.raises(jct.FormatVersionError, match="format version 3"):
        jct.StepManager(run).restore()


def test_mismatched_target_tries_no_other_step(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    target = {"state": {"w": jnp.zeros(5), "step": jnp.int32(0)}}
    with pytest.raises(jct.MismatchError, match=r"step-0000000002.*\n?.*w"):
        jct.StepManager(run).restore(target)


def test_unrequested_checkpointables_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example the position in the data, which would start again and be missing from later steps."""
    with jct.StepManager(tmp_path) as manager:
        manager.save(1, {"state": state_of(1), "data": jct.JsonValue({"position": 7})})
        manager.wait()
        manager.restore({"state": None, "data": None})
        manager.restore()
        assert caplog.text == ""
        manager.restore({"state": None})
        assert "step 1 also has 'data'" in caplog.text


def test_an_io_error_is_damage(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    segment = step_path(run, 2) / "state" / "p00000-s000.safetensors"
    segment.unlink()
    os.mkfifo(segment)
    assert step_of(jct.StepManager(run).restore()) == 1


def test_new_branch_after_roll_back_is_latest(tmp_path: Path) -> None:
    run = made_run(tmp_path, 10, 20, 30)
    with jct.StepManager(run) as manager:
        assert step_of(manager.restore(step=10)) == 10
        manager.save(20, {"state": state_of(2000)})
        manager.wait()
        assert manager.latest == 20
        assert step_of(manager.restore(step=20)) == 2000
        with pytest.raises(jct.CheckpointExistsError, match="step 10 is committed already"):
            manager.save(10, {"state": state_of(1)})
        with pytest.raises(jct.CheckpointExistsError, match="step 20 is committed already"):
            manager.save(20, {"state": state_of(1)})
        manager.save(30, {"state": state_of(3000)})
        manager.wait()
        assert (manager.latest, manager.steps) == (30, [10, 20, 30])
        assert step_of(manager.restore()) == 3000


def test_a_new_branch_survives_a_restart(tmp_path: Path) -> None:
    """The process that rolled back ends before it reaches the step numbers of the old branch."""
    run = made_run(tmp_path, 10, 20, 30)
    with jct.StepManager(run) as manager:
        manager.restore(step=10)
        save_steps(manager, 15)
    with jct.StepManager(run) as manager:
        assert manager.latest == 15
        assert step_of(manager.restore()) == 15
        manager.save(20, {"state": state_of(2000)})
        manager.save(30, {"state": state_of(3000)})
        manager.wait()
        assert manager.latest == 30
        assert step_of(manager.restore()) == 3000
        with pytest.raises(jct.CheckpointExistsError, match="step 15 is committed already"):
            manager.save(15, {"state": state_of(1)})


def test_damaged_step_does_not_count_for_retention(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    flip_a_payload_byte(step_path(run, 3))
    with jct.StepManager(run, preservation_policy=jct.LatestN(2)) as manager:
        assert step_of(manager.restore()) == 2
        save_steps(manager, 4)
        assert [step for step in manager.steps if step != 3] == [2, 4]


def test_damaged_generation_falls_back_to_one_before(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1)
    step_path(run, 1).rename(tmp_path / "kept")
    made_run(run, 1)
    step_path(run, 1).rename(run / "step-0000000001.g1")
    (tmp_path / "kept").rename(step_path(run, 1))
    flip_a_payload_byte(run / "step-0000000001.g1")
    assert step_of(jct.StepManager(run).restore()) == 1


def test_data_position_and_state_share_one_step(tmp_path: Path) -> None:
    data = Counter()
    with jct.StepManager(tmp_path) as manager:
        for step in (1, 2):
            next(data)
            manager.save(step, {"state": state_of(step), "data": data})
    flip_a_payload_byte(step_path(tmp_path, 2))
    fresh = Counter()
    restored = jct.StepManager(tmp_path).restore({"state": state_of(0), "data": fresh})
    assert (step_of(restored), restored["data"], fresh.position) == (1, fresh, 1)


def test_progress_and_history_count_bytes_read(tmp_path: Path) -> None:
    with jct.StepManager(made_run(tmp_path, 1)) as manager:
        manager.own()
        read: list[int] = []
        manager.restore(progress=read.append)
        event = manager.history.events()[-1]
    assert event["event"] == "restore"
    assert event["bytes"] == sum(read) >= 12000
    assert event["restore_s"] > 0
    assert (event["step"], event["name"], "skipped" in event) == (1, step_path(tmp_path, 1).name, False)


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    before = {path.name: path.stat().st_mtime_ns for path in run.rglob("*")}
    manager = jct.StepManager(run)
    manager.restore()
    manager.metadata()
    manager.close()
    assert {path.name: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("in_place", [False, True])
def test_mismatch_does_not_move_data_iterator(tmp_path: Path, in_place: bool) -> None:
    data = Counter()
    next(data)
    saved: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0)) if in_place else state_of(1)
    other: Any = nnx.Linear(2, 3, rngs=nnx.Rngs(0)) if in_place else {**state_of(1), "more": np.ones(2)}
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(1, {"data": data, "state": saved})
        manager.wait()
    fresh = Counter()
    with pytest.raises(jct.MismatchError):
        jct.StepManager(tmp_path / "run").restore({"data": fresh, "state": other})
    assert fresh.position == 0
    jct.StepManager(tmp_path / "run").restore({"data": fresh, "state": saved})
    assert fresh.position == 1


class DeletingBackend(LocalBackend):
    """Has the owner of a run delete a step right before its COMMIT is first opened."""

    def __init__(self, delete: Callable[[], None]) -> None:
        super().__init__()
        self._delete: list[Callable[[], None]] = [delete]

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if name == "COMMIT" and self._delete:
            self._delete.pop()()
        return super().open(directory, name, direct=direct)


def test_reader_retries_when_step_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path / "run", 1)
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as owner:

        def save_next() -> None:
            save_steps(owner, 2)
            assert owner._run._deleter.wait(60)

        assert step_of(jct.StepManager(run, backend=DeletingBackend(save_next)).restore()) == 2
    assert "cannot be restored" not in caplog.text


def test_manually_removed_step_falls_back(tmp_path: Path) -> None:
    with jct.StepManager(made_run(tmp_path / "run", 1, 2)) as owner:
        owner.own()
        shutil.rmtree(step_path(tmp_path / "run", 2))
        assert step_of(owner.restore()) == 1
        with pytest.raises(jct.StepNotFoundError, match="has no committed step 2"):
            owner.restore(step=2)


@pytest.mark.parametrize(
    ("value", "file", "code"),
    [
        (state_of(0), "value/p00000-s000.safetensors", errno.EACCES),
        (jct.JsonValue({"a": 1}), "value/p00000.json", errno.EMFILE),
    ],
    ids=["array", "plain file"],
)
def test_unreadable_file_is_not_damage(tmp_path: Path, value: Any, file: str, code: int) -> None:
    """The step is intact: a restore of an older one would lose work."""
    with jct.StepManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"value": value}, force=True)
    backend = RefusingBackend("open", f"step-0000000002/{file}", code, times=1)
    with pytest.raises(jct.StorageError, match="refused to open") as caught:
        jct.StepManager(tmp_path / "run", backend=backend).restore()
    assert caught.value.errno == code
    report = jct.verify(step_path(tmp_path / "run", 2))
    assert report.ok


def test_arrays_of_damaged_step_are_freed_first(tmp_path: Path) -> None:
    """A state that fills most of a device fits once, and the traceback of the failure could keep it alive."""
    alive: list[int] = []
    seen: list[weakref.ref[jax.Array]] = []
    put = device_put.DevicePuts.put

    def watched(self: Any, number: int, *rest: Any, **how: Any) -> Any:
        array = put(self, number, *rest, **how)
        if array is not None:
            alive.append(sum(one() is not None for one in seen))
            seen.append(weakref.ref(array))
        return array

    names = [f"x{number}" for number in range(6)]
    with jct.StepManager(tmp_path / "run", settings=jct.StoreSettings(io_threads=1)) as manager:
        for step in (1, 2):
            manager.save(step, {"state": {name: jnp.full(1 << 22, step, jnp.int32) for name in names}}, force=True)
    segment = step_path(tmp_path / "run", 2) / "state" / "p00000-s000.safetensors"
    with segment.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    like = {"state": {name: jax.ShapeDtypeStruct((1 << 22,), jnp.int32) for name in names}}
    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_put.DevicePuts, "put", watched)
            restored = jct.StepManager(tmp_path / "run").restore(like)
    finally:
        gc.enable()
    assert int(restored["state"]["x0"][0]) == 1
    assert len(seen) > 6, "something of the damaged step was loaded"
    assert alive[-6:] == list(range(6)), "nothing of the damaged step is alive while the next is loaded"
