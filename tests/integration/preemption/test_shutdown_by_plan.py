"""A signal and a slow disk: the last save is started only if it can finish in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.runs import talking_to
from tests.support.signal_handlers import WATCHED, handlers_put_back

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


IN_TIME = """
import sys
import jaxckpt_train as jct
from tests.support.fake_backends import SlowBackend, callback_on
from tests.support.runs import state_of

policy = jct.SpecificStepsPolicy([6])
options = {"save_interval_steps": None, "save_policy": policy, "grace_period_s": 3.0, "exit_code": 3}
with callback_on(SlowBackend(12_004 / 1.2), sys.argv[1], **options) as ckpt:
    ckpt.resume(state_of(0))
    for step in ckpt.steps(10**9):
        ckpt(state_of(step + 1))
        if step == 5:
            ckpt.wait_until_finished()
        if step == 6:
            print("ready", flush=True)
"""


def test_process_ends_within_grace_period(tmp_path: Path) -> None:
    with talking_to(IN_TIME, tmp_path) as job:
        assert job.read() == "ready"
        asked_at = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        code, _ = job.finish()
        took_s = time.monotonic() - asked_at
    assert code == 3
    assert took_s < 3.0
    assert jct.StepManager(tmp_path).steps == [6]
    events = jct.StepManager(tmp_path).history.events()
    assert [event["event"] for event in events] == ["start", "resumed", "save", "preempted", "end"]
    assert events[-2]["plan"].startswith("keeping step 6: no time")
