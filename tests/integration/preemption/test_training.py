"""A real training per cloud: after the notice, it saves its last step and exits in time with the right exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt_train as jct
from tests.conftest import REPO_ROOT
from tests.support.metadata_servers import Gce, Imds, Server

GRACE_S, EXIT_CODE = 20.0, 77
TRAINING = """
import json, sys, threading
import numpy as np
import jaxckpt_train as jct

pause, state = threading.Event(), {"w": np.zeros(1000)}
with jct.CheckpointCallback(sys.argv[1], **json.loads(sys.argv[2])) as ckpt:
    state = ckpt.resume(state)
    for step in ckpt.steps(10**9):
        pause.wait(0.001)  # an update
        state = {"w": state["w"] + 1}
        ckpt(state)
        if step == 3:
            print("training", flush=True)
"""


@dataclasses.dataclass
class Training:
    """A running training, and checks of how it ended."""

    process: subprocess.Popen[str]
    directory: Path
    noticed_at: float = 0.0

    def check_that_it_left(self, reason: str, grace_s: float = GRACE_S) -> int:
        """Check that the last step is the only one and that the history has the reason; return the step."""
        _, errors = self.process.communicate(timeout=60)
        took_s = time.monotonic() - self.noticed_at
        assert self.process.returncode == EXIT_CODE, errors
        assert took_s < grace_s
        assert "Traceback" not in errors
        (directory,) = self.directory.glob("step-*")
        step = int(directory.name.removeprefix("step-"))
        state = jct.load(directory)
        assert state["w"].tobytes() == np.full(1000, float(step)).tobytes()
        lines = (self.directory / "history.jsonl").read_text().splitlines()
        event = json.loads(lines[-2])  # before the end event
        assert (event["event"], event["step"], event["reason"]) == ("preempted", step, reason)
        return step


@contextlib.contextmanager
def training(directory: Path, **options: Any) -> Iterator[Training]:
    """Start a training that handles no signals."""
    options = {
        "signals": [],
        "save_interval_steps": 10**9,
        "grace_period_s": GRACE_S,
        "exit_code": EXIT_CODE,
        **options,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_NUM_CPU_DEVICES": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n", process.communicate()
        yield Training(process, directory, time.monotonic())
    finally:
        process.kill()
        process.communicate()


def node(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"_target_": f"jaxckpt_train.{name}", **arguments}]


def test_google_compute_engine_preempts_training(tmp_path: Path) -> None:
    gce = Gce()
    with (
        Server(gce) as server,
        training(tmp_path, notices=node("GceNotice", url=server.url, poll_s=0.05)) as run,
    ):
        gce.values["preempted"] = "TRUE"
        run.check_that_it_left("Google Compute Engine, which preempts this machine")


def test_amazon_ec2_interrupts_training_with_a_deadline(tmp_path: Path) -> None:
    """No grace period is set; the time in the notice limits the shutdown."""
    imds = Imds()
    with (
        Server(imds) as server,
        training(tmp_path, notices=node("AwsNotice", url=server.url, poll_s=0.05), grace_period_s=None) as run,
    ):
        imds.tokens.clear()  # as if the token had expired
        imds.interrupt("terminate", (datetime.now(UTC) + timedelta(seconds=GRACE_S)).strftime("%Y-%m-%dT%H:%M:%SZ"))
        run.check_that_it_left("Amazon EC2, which is to terminate this spot instance")
