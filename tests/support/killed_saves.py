"""Killed saves of a single checkpoint, and the files that they leave next to it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store import process_identity as machine
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.forking import forked

OF_KILLED_SAVES = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fork"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads from /proc which processes are dead"),
]


def assert_holds(checkpoint: Path, tree: dict[str, np.ndarray]) -> None:
    assert np.array_equal(jct.load(checkpoint)["w"], tree["w"])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Do it in a forked process with its own patches; a kill must end it."""
    reports, status = forked(lambda tell: work(pytest.MonkeyPatch()))
    assert (reports, status) == ([], -signal.SIGKILL)


def killed_after_the_exchange(
    checkpoint: Path, tree: dict[str, np.ndarray], before: Callable[[], None] = lambda: None
) -> None:
    """Overwrite it in a process that calls `before` right before the exchange, and dies right after it."""
    real = LocalBackend.exchange

    def exchange(self: LocalBackend, first: str, second: str, *, sync: bool) -> None:
        before()
        real(self, first, second, sync=sync)
        die()

    def work(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(LocalBackend, "exchange", exchange)
        jct.save(checkpoint, tree, overwrite=True)

    killed(work)
    assert_holds(checkpoint, tree)


def dead_attempt(checkpoint: Path) -> Path:
    """Return the name of an attempt by a dead process."""
    tag = re.sub(r"-[0-9]+-[0-9]+$", "-1-1", machine.process_tag())  # process 1 is alive, but started at another time
    return checkpoint.with_name(f".{checkpoint.name}.tmp-{tag}-0")


def of_another_boot(attempt: Path) -> Path:
    """Rename an attempt as if the machine had rebooted since."""
    return attempt.rename(attempt.with_name(re.sub(r"(\.tmp-[0-9a-f]{8})-[0-9a-f]{8}", r"\1-00000000", attempt.name)))


def save_under(name: Path, parts: Any) -> None:
    """Save under the name of a leftover, which no save accepts."""
    jct.save_checkpointables(name.with_name("to-be-moved"), parts)
    name.with_name("to-be-moved").rename(name)
