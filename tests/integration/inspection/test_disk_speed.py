"""The trial of a disk leaves no file, whichever signal ends it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.runs import talking_to

TRIAL = """
import sys
from jaxckpt_train.inspection.disk_speed import try_disk
from jaxckpt_train.store.backends.local import LocalBackend

def progress(done):
    print(done)
    sys.stdin.readline()

try_disk(LocalBackend(), sys.argv[1], 4 << 20, progress)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_no_trial_file(tmp_path: Path, number: signal.Signals) -> None:
    with talking_to(TRIAL, tmp_path) as trial:
        assert trial.read() == str(4 << 20)
        trial.process.send_signal(number)
        trial.tell("go on")  # the main thread handles an interrupt after the reading thread has ended
        trial.process.wait(timeout=60)
    assert list(tmp_path.iterdir()) == []
