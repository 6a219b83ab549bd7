"""A save given up at the end of the grace period, in a real process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.signal_handlers import WATCHED, handlers_put_back

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    """Restore the handlers, which ignore further signals once a process leaves."""
    with handlers_put_back(*WATCHED, may_end=True):
        yield


GIVEN_UP = """
import atexit, os, signal, sys
atexit.register(print, "registered before", flush=True)
import numpy as np
from tests.support.fake_backends import HoldingBackend, callback_on

ckpt = callback_on(HoldingBackend("rename", "step-0000000001"), sys.argv[1], grace_period_s=1.0)
with ckpt:
    ckpt.resume({"w": np.zeros(3)})
    os.kill(os.getpid(), signal.SIGTERM)
    ckpt({"w": np.ones(3)})
"""


def test_exit_functions_run_once_after_abandoned_save(tmp_path: Path, run_python: Any) -> None:
    done = run_python(GIVEN_UP, tmp_path, timeout_s=60)
    assert done.returncode == 75
    assert done.stdout == "registered before\n"
    assert "RecursionError" not in done.stderr
