"""Calls of an Orbax-style manager in each process of a job, and their results."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import jax
import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.integrations.orbax_manager import CheckpointManager, CheckpointManagerOptions, args


def state_of(step: int, value: float | None = None) -> dict[str, Any]:
    """Return an array with a row for each device of the job, filled with the step."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    rows = np.full((jax.device_count(), 3), step if value is None else value, np.float32)
    return {"w": jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index]), "n": np.int32(step)}


def saves_and_restores(directory: str) -> list[Any]:
    """Save, prune, delete and restore."""
    answers: list[Any] = []
    options = CheckpointManagerOptions(
        should_save_fn=lambda step, newest: step % 2 == 0,
        max_to_keep=3,
        best_fn=lambda metrics: metrics["loss"],
        best_mode="min",
    )
    with CheckpointManager(directory, options=options) as manager:
        for step in range(9):
            is_due = manager.should_save(step)
            is_saved = manager.save(step, args=args.StandardSave(state_of(step)), metrics={"loss": abs(step - 5)})
            answers.append((is_due, is_saved, manager.latest_step()))
        manager.wait_until_finished()
        answers.append((manager.all_steps(), manager.best_step()))
        manager.delete(6)
        answers.append((manager.all_steps(), manager.best_step(), manager.metrics(4)))
        looked = manager.restore(4, args=args.StandardRestore(state_of(0)))
        answers.append((rows_of(looked), manager.latest_step()))
    with CheckpointManager(directory, options=options) as manager:
        restored = manager.restore(manager.latest_step(), args=args.StandardRestore(state_of(0)))
        answers.append((rows_of(restored), manager.should_save(8), manager.should_save(10)))
    return answers


def rows_of(state: dict[str, Any]) -> list[float]:
    """Return the values of the rows of this process, and the number."""
    shards = [np.asarray(shard.data).tolist() for shard in state["w"].addressable_shards]
    return [*{value for shard in shards for row in shard for value in row}, float(state["n"])]


def fails(directory: str) -> list[Any]:
    """Make a save fail in all processes."""
    answers: list[Any] = []
    with CheckpointManager(directory, settings=jct.StoreSettings(nonfinite="reject")) as manager:
        answers.append(manager.save(1, args=args.StandardSave(state_of(1))))
        answers.append(manager.save(2, args=args.StandardSave(state_of(2, float("nan")))))
        try:
            manager.save(3, args=args.StandardSave(state_of(3)))
        except jct.CheckpointError as error:
            answers.append(type(error).__name__)
        manager.wait_until_finished()
        answers.append((manager.latest_step(), manager.should_save(4), manager.all_steps()))
    return answers


def is_asked(directory: str, process: int, saves_first: bool) -> list[Any]:
    """Send SIGTERM to one process; all save the same step. `saves_first`: save before the check for preemption."""
    options = CheckpointManagerOptions(save_interval_steps=10**9)
    answers: list[Any] = []
    with CheckpointManager(directory, options=options) as manager:
        for step in itertools.count():  # JAX needs several steps to agree
            if step == 5 and jax.process_index() == process:
                os.kill(os.getpid(), signal.SIGTERM)
            reached = not saves_first and manager.reached_preemption(step)
            manager.save(step, args=args.StandardSave(state_of(step)))
            if reached or (saves_first and manager.reached_preemption(step)):
                answers.append(step)
                break
        manager.wait_until_finished()
        answers.append(manager.all_steps() == [0, step])
    return answers
