"""Problems of other checkpointers in daily use: restores, copies, noise, old files."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.conftest import RunPython
from tests.golden.make_golden import FOLDER, INDEXED, golden_tree
from tests.support.jobs.arrays import values_of
from tests.support.runs import DAMAGE, files_below, made_run, save_steps, state_of, step_of, step_path


# 4. A bad newest checkpoint falls back, and never silently to step 0.
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_step_falls_back_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    run = made_run(tmp_path / "run", 10, 20, 30)
    spoil, file = DAMAGE[damage]
    spoil(step_path(run, 30))
    before = files_below(run)
    with jct.CheckpointCallback(str(run), save_on_exit=False) as ckpt:
        state = ckpt.resume(state_of(0))
        assert ckpt.completed_steps == 20
    assert step_of({"state": state}) == 20
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("step 30 cannot be restored and is skipped" in text and file in text for text in warnings)
    after = files_below(run)
    assert file.encode() in after.pop("record/0000000001.json")
    assert after == before
    assert (jct.StepManager(run).steps, jct.StepManager(run).damaged) == ([10, 20], [30])


# 15. Best and latest together.
def test_best_and_latest_steps_are_kept_together(tmp_path: Path) -> None:
    keep = jct.AnyPreservationPolicy([jct.BestN("loss", 2, "min"), jct.LatestN(2)])
    with jct.StepManager(tmp_path / "run", preservation_policy=keep) as manager:
        for number, step in enumerate((100, 200, 300, 400, 500)):
            save_steps(manager, step, metrics={"loss": jnp.float32(number)})
    with jct.StepManager(tmp_path / "run") as manager:
        assert manager.steps == [100, 200, 400, 500]
        manager.attach_metrics(500, {"loss": float("nan"), "accuracy": 0.9})
        assert manager.best("loss") == 100
        assert manager.best("accuracy", "max") == 500
        manager.attach_metrics(400, {"loss": -1})
        assert manager.best("loss") == 400


# 22. Deletion is off the hot path; a pinned step survives.
def test_a_pinned_step_survives_retention_and_restarts(tmp_path: Path) -> None:
    for first in (1, 4):
        with jct.StepManager(tmp_path / "run", preservation_policy=jct.LatestN(1)) as manager:
            for step in range(first, first + 3):
                save_steps(manager, step)
                if step == 2:
                    manager.pin(2)
    assert jct.StepManager(tmp_path / "run").steps == [2, 6]


# 25. A checkpoint directory can be copied; one commit rule everywhere.
@pytest.mark.parametrize("way", ["cp -r", "tar"])
def test_a_copy_loads_elsewhere(tmp_path: Path, way: str) -> None:
    run = made_run(tmp_path / "run", 10)
    target = tmp_path / "elsewhere"
    if way == "cp -r":
        subprocess.run(["cp", "-r", run, target], check=True)
    else:
        target.mkdir()
        subprocess.run(f"tar -C {run} -cf - . | tar -C {target} -xf -", shell=True, check=True)
    assert step_of(jct.StepManager(target).restore()) == 10
    assert jct.verify(step_path(target, 10)).ok


@pytest.mark.parametrize("lost", ["COMMIT", "manifest.json", "state/p00000-s000.safetensors"])
def test_incomplete_copy_is_refused_and_never_deleted(tmp_path: Path, lost: str) -> None:
    run = made_run(tmp_path / "run", 10, 20)
    (step_path(run, 20) / lost).unlink()
    left = files_below(step_path(run, 20))
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        assert step_of(manager.restore()) == 10
        save_steps(manager, 30, 40)
    assert files_below(step_path(run, 20)) == left
    with pytest.raises((jct.NotACheckpointError, jct.CorruptCheckpointError), match=lost.rpartition("/")[2]):
        jct.load(step_path(run, 20))


# 26. Many small arrays are cheap.
def test_ten_thousand_leaves_need_few_files(tmp_path: Path) -> None:
    tree = {f"leaf{n:05d}": np.full(256, n, np.float32) for n in range(10_000)}
    jct.save(tmp_path / "a", tree)
    assert sum(path.is_file() for path in (tmp_path / "a").rglob("*")) <= 20
    loaded = jct.load(tmp_path / "a")
    assert all(loaded[name].tobytes() == leaf.tobytes() for name, leaf in tree.items())


# 28. Quiet and forgiving.
def test_training_prints_nothing(tmp_path: Path, run_python: RunPython) -> None:
    script = """
import asyncio, sys, jax.numpy as jnp, jaxckpt_train as jct
async def main():
    with jct.CheckpointCallback("~/run", save_interval_steps=1) as ckpt:
        state = ckpt.resume({"w": jnp.ones(3)})
        for step in ckpt.steps(3):
            ckpt({"w": state["w"] + step})
    jct.load("run/step-0000000003")
asyncio.run(main())
"""
    done = run_python(script, cwd=tmp_path, env={"HOME": str(tmp_path), "PYTHONWARNINGS": "error"}, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert jct.StepManager(tmp_path / "run").steps == [1, 2, 3]


# 29. One command starts, resumes or initialises.
# 30. Old checkpoints keep loading.
def test_the_golden_checkpoint_of_version_1_loads_exactly() -> None:
    expected = golden_tree()
    assert FOLDER.name == "v1"
    assert jct.verify(FOLDER).ok
    loaded = jct.load(FOLDER, golden_tree())
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(loaded), jax.tree.leaves(expected), strict=True):
        assert type(found) is type(wanted), path
        if not hasattr(wanted, "dtype"):
            assert repr(found) == repr(wanted), path
            continue
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(found) == jax.random.key_impl(wanted)
            found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
        assert np.asarray(found).dtype == np.asarray(wanted).dtype, path
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), path
    assert jct.load_checkpointables(FOLDER, {"notes": None})["notes"] == jct.JsonValue({"made": "once", "n": [1, 2.5]})


def test_the_golden_checkpoint_of_version_2_loads_exactly() -> None:
    assert INDEXED.name == "v2"
    assert jct.verify(INDEXED).ok
    assert jct.metadata(INDEXED).format_version == 2
    loaded = jct.load_checkpointables(INDEXED)
    assert loaded["notes"] == jct.JsonValue({"n": 1})
    for name, shape, dtype in (("kernel", [16, 6], "float32"), ("rows", [8, 3], "bfloat16"), ("scale", [5], "float32")):
        found = np.asarray(loaded["state"][name])
        assert (found.dtype, found.tobytes()) == (np.dtype(dtype), values_of(shape, dtype).tobytes())
