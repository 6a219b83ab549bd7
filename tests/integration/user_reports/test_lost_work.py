"""Problems of other checkpointers that lose work: failing saves, sudden exits, preemptions."""

from __future__ import annotations

import errno
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.conftest import RunPython
from tests.support.runs import Counter, state_of, step_of

LOOP = """
import os, signal, sys
import jax, jax.numpy as jnp
import jaxckpt_train as jct
from tests.support.runs import Counter

@jax.jit(donate_argnums=0)
def update(state, batch):
    key, dropout = jax.random.split(state["key"])
    mask = jax.random.bernoulli(dropout, 0.8, state["w"].shape)
    w = state["w"] * 0.99 + mask * batch
    return {"w": w, "key": key, "step": state["step"] + 1}, w.sum()

def fresh():
    return {"w": jnp.ones(1000), "key": jax.random.key(5), "step": jnp.int32(0)}

def train(updates, **options):
    with jct.CheckpointCallback(sys.argv[1], **options) as ckpt:
        state, data = ckpt.resume(fresh(), Counter())
        for step in ckpt.steps(updates):
            state, loss = update(state, jnp.float32(next(data)))
            during(step, ckpt)
            ckpt(state, metrics={"loss": loss})
            print(step + 1, float(loss).hex(), flush=True)
            after(step, ckpt)

def during(step, ckpt): pass
def after(step, ckpt): pass
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("a small tmpfs can be mounted by root only")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def losses(output: str) -> dict[int, str]:
    return {int(line.split()[0]): line.split()[1] for line in output.splitlines()}


def saved(directory: Path, step: int) -> dict[str, bytes]:
    loaded = jct.load_checkpointables(directory / f"step-{step:010d}")
    loaded["state"]["key"] = jax.random.key_data(loaded["state"]["key"])
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree.leaves_with_path(loaded)}


# 1. A failed background save is loud.
@pytest.mark.parametrize("noticed_by", ["the next save", "wait", "close"])
def test_full_disk_raises_and_keeps_earlier_step(small_disk: Path, noticed_by: str) -> None:
    manager = jct.StepManager(small_disk / "run")
    manager.save(1, {"state": state_of(1)})
    manager.wait()
    manager.save(2, {"state": {"w": np.zeros(4 << 20, np.uint8)}}).pending.committed.exception()
    with pytest.raises(OSError, match="No space left on device") as caught:
        if noticed_by == "the next save":
            manager.save(3, {"state": state_of(3)})
        elif noticed_by == "wait":
            manager.wait()
        else:
            manager.close()
    assert caught.value.errno == errno.ENOSPC
    assert any("step 2" in note for note in caught.value.__notes__)
    assert manager.steps == [1]
    assert [path.name for path in (small_disk / "run").glob("*step*")] == ["step-0000000001"]
    assert step_of(jct.StepManager(small_disk / "run").restore()) == 1
    if noticed_by != "close":
        manager.save(4, {"state": state_of(4)})
        manager.close()
        assert step_of(jct.StepManager(small_disk / "run").restore()) == 4


def test_training_whose_save_failed_ends_with_error(small_disk: Path, run_python: RunPython) -> None:
    script = LOOP.replace("jnp.ones(1000)", "jnp.ones(1_000_000)") + "train(3, save_interval_steps=1)"
    done = run_python(script, small_disk / "run")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "while saving step 1" in done.stderr


# 2. Every exit path drains or aborts the pending save.
@pytest.mark.parametrize("ending", ["the end of the script", "sys.exit(3)", "an exception"])
def test_a_script_that_ends_without_close_still_commits(tmp_path: Path, run_python: RunPython, ending: str) -> None:
    script = """
import sys, jax.numpy as jnp, jaxckpt_train as jct
manager = jct.StepManager(sys.argv[1])
manager.save(7, {"state": {"w": jnp.arange(3_000_000.0)}})
"""
    last = {"sys.exit(3)": "sys.exit(3)", "an exception": "raise KeyError('mine')"}.get(ending, "")
    done = run_python(script + last, tmp_path / "run")
    assert done.returncode == {"sys.exit(3)": 3, "an exception": 1}.get(ending, 0), done.stderr
    assert jct.StepManager(tmp_path / "run").restore()["state"]["w"].tobytes() == np.arange(3e6, dtype="f4").tobytes()


@pytest.mark.parametrize("error", [KeyError("the loop's own"), KeyboardInterrupt()], ids=repr)
def test_loop_error_is_raised_after_pending_save(tmp_path: Path, error: BaseException) -> None:
    def loop() -> None:
        with jct.CheckpointCallback(str(tmp_path / "run"), save_interval_steps=2) as ckpt:
            state = ckpt.resume(state_of(0))
            for step in ckpt.steps(10):
                ckpt(state_of(step + 1))
                if step == 4:
                    raise error
            del state

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    assert jct.StepManager(tmp_path / "run").steps == [2, 4]


def test_failed_last_save_does_not_mask_loop_error(small_disk: Path) -> None:
    def loop() -> None:
        with jct.CheckpointCallback(str(small_disk / "run"), save_interval_steps=1) as ckpt:
            ckpt.resume({"w": np.zeros(4 << 20, np.uint8)})
            ckpt({"w": np.zeros(4 << 20, np.uint8)})
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own") as caught:
        loop()
    assert any("No space left on device" in note for note in caught.value.__notes__)


# 7. Bit-identical resume, PRNG included.  9. SIGTERM works without jax.distributed; the handler only sets a flag.
def test_twenty_steps_equal_ten_and_sigterm_and_ten(tmp_path: Path, run_python: RunPython) -> None:
    term = "def after(step, ckpt):\n    if step == 9 and not os.path.exists(sys.argv[1] + '.done'):\n"
    term += "        open(sys.argv[1] + '.done', 'w').close()\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    run = "train(20, save_interval_steps=100)"
    straight = run_python(LOOP + run, tmp_path / "straight", check=True)
    first = run_python(LOOP + term + run, tmp_path / "cut")
    assert first.returncode == 75, first.stderr
    second = run_python(LOOP + term + run, tmp_path / "cut", check=True)
    cut, again = losses(first.stdout), losses(second.stdout)
    assert list(cut) == list(range(1, max(cut) + 1))
    assert list(again) == list(range(max(cut) + 1, 21))
    assert {**cut, **again} == losses(straight.stdout)
    assert saved(tmp_path / "cut", 20) == saved(tmp_path / "straight", 20)


def test_repeated_signals_do_not_kill_save(tmp_path: Path, run_python: RunPython) -> None:
    script = (
        LOOP.replace("jnp.ones(1000)", "jnp.ones(5_000_000)")
        + """
import threading
def storm():
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
def during(step, ckpt):
    if step == 1:
        threading.Thread(target=storm, daemon=True).start()
        while not ckpt._shutdown.must_leave(): pass
train(20, save_interval_steps=100)
"""
    )
    done = run_python(script, tmp_path / "run")
    # The signals may kill the process once the handlers are restored.
    assert done.returncode in (75, -signal.SIGTERM), done.stderr
    assert jct.StepManager(tmp_path / "run").steps == [2]
    assert jct.verify(tmp_path / "run" / "step-0000000002").ok


def test_preemption_inside_evaluation_is_noticed_by_poll(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    evaluated = 0
    with (
        pytest.raises(SystemExit),
        jct.CheckpointCallback(str(tmp_path / "run"), save_interval_steps=100, notice_file=str(notice)) as ckpt,
    ):
        _, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(10):
            next(data)
            if step == 2:
                notice.touch()
                ckpt._shutdown._file._next = -1.0  # as if a second had passed since the last poll
                assert ckpt.poll()  # between the batch and the update: noticed, not yet saved
                assert jct.StepManager(tmp_path / "run").steps == []
            ckpt(state_of(step + 1))
            while evaluated < 5 and not ckpt.poll():
                evaluated += 1
    restored = jct.StepManager(tmp_path / "run").restore()
    assert step_of(restored) == restored["data"]["position"] == 3


# 11. Donation-safe the moment `save` returns.
def test_donation_after_save_changes_nothing(tmp_path: Path) -> None:
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2 + 1, state), donate_argnums=0)
    manager = jct.StepManager(tmp_path / "run", preservation_policy=jct.LatestN(1))
    state: Any = {"w": jnp.arange(50_000.0), "host": np.zeros(10)}
    for step in range(60):
        expected = np.asarray(state["w"]).tobytes(), state["host"].tobytes()
        manager.save(step, {"state": state})
        state = {"w": update(state["w"]) % 1000, "host": state["host"]}
        state["host"] += 1
        manager.wait()
        restored = manager.restore()["state"]
        assert (restored["w"].tobytes(), restored["host"].tobytes()) == expected
    manager.close()


# 23. Blocking time is short and reported.
def test_history_has_duration_of_each_phase(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(1, {"state": state_of(1), "data": Counter()}, metrics={"loss": jnp.float32(0.5)})
        manager.wait()
        manager.restore()
        _, save, restore = manager.history.events()
    for field in ("decide_s", "snapshot_s", "stage_s", "write_s", "commit_s", "blocked_s", "wait_s"):
        assert save[field] >= 0
    assert save["bytes"] >= 12_004
    assert restore["bytes"] >= 12_000
    assert save["bytes_per_s"] > 0
    assert restore["bytes_per_s"] > 0
