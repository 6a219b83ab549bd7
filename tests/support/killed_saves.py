"""Saves of a single checkpoint that are killed, and what such a save leaves beside it."""

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
    pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are dead"),
]


def assert_holds(checkpoint: Path, tree: dict[str, np.ndarray]) -> None:
    assert np.array_equal(jct.load(checkpoint)["w"], tree["w"])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Do it in a process of its own, with what it replaces there; a kill has to end it."""
    told, status = forked(lambda tell: work(pytest.MonkeyPatch()))
    assert (told, status) == ([], -signal.SIGKILL)


def killed_after_the_exchange(
    checkpoint: Path, tree: dict[str, np.ndarray], before: Callable[[], None] = lambda: None
) -> None:
    """Overwrite it, in a process that does something right before the exchange, and ends right after it."""
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
    """The name of an attempt at it by a process that is gone."""
    tag = re.sub(r"-[0-9]+-[0-9]+$", "-1-1", machine.process_tag())  # process 1 lives, and began at another time
    return checkpoint.with_name(f".{checkpoint.name}.tmp-{tag}-0")


def of_another_boot(attempt: Path) -> Path:
    """Give an attempt the name that it would have, had the machine been booted anew since."""
    return attempt.rename(attempt.with_name(re.sub(r"(\.tmp-[0-9a-f]{8})-[0-9a-f]{8}", r"\1-00000000", attempt.name)))


def save_under(name: Path, parts: Any) -> None:
    """Save under a name that no save takes, as it is that of a left-over."""
    jct.save_checkpointables(name.with_name("to-be-moved"), parts)
    name.with_name("to-be-moved").rename(name)
