"""Runs for reports: hand-made histories, and one with real preemptions and kills."""

from __future__ import annotations

import datetime
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxckpt_train.report.changes import plan_changes
from jaxckpt_train.report.gather import Gathered, RunHistory, gather, read_run
from jaxckpt_train.report.series import ReportEvent
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.runs import START, talking_to

BACKEND = LocalBackend()
NOW = START + datetime.timedelta(days=1)
LAST_STEP = 60
# Saves every fifth step and keeps three; the loss of a step is 1 / step. Pauses at one step, where signals arrive.
TRAINING = """
import sys, signal
import jax.numpy as jnp
import jaxckpt_train as jct

def state_of(step):
    params = {"kernel": jnp.arange(6000.0).reshape(60, 100) + step, "bias": jnp.zeros(3)}
    return {"params": params, "step": jnp.int32(step)}

with jct.CheckpointCallback(sys.argv[1], save_interval_steps=5, keep_latest=3, keep_every_steps=20) as ckpt:
    state = ckpt.resume(state_of(0))
    for step in ckpt.steps(int(sys.argv[2])):
        state = state_of(step + 1)
        ckpt(state, metrics={"loss": 1 / (step + 1)})
        if step + 1 == int(sys.argv[3]):
            ckpt.wait_until_finished()
            print("there", flush=True)
            sys.stdin.readline()
"""


def train_until(directory: Path, step: int, how: signal.Signals | None) -> int:
    """Train to a step, send a signal there if any, continue, and return the exit code."""
    with talking_to(TRAINING, directory, str(LAST_STEP), str(step)) as training:
        assert training.read() == "there"
        if how is not None:
            training.process.send_signal(how)
        if how is not signal.SIGKILL:
            training.tell("on")
        return training.finish()[0]


def write_history(directory: Path, *events: Mapping[str, Any]) -> Path:
    """Write a run that has only a history."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def gathered_of(directory: Path, changes: int | None = None, made: datetime.datetime = NOW) -> Gathered:
    """Return the data of a report of a run."""
    read = read_run(BACKEND, str(directory))
    return gather(BACKEND, read, plan_changes(read.looks, changes), made, lambda nbytes: None)


def history_of(*events: Mapping[str, Any]) -> RunHistory:
    """Return the history that a report builds from events."""
    history = RunHistory()
    for event in events:
        history.add(msgspec.convert(event, ReportEvent))
    return history
