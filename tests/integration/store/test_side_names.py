"""Leftovers under the side name of a checkpoint, `.NAME.aside`, are removed although the cleanup is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend, side_name
from jaxckpt_train.store.removal import remove_dead_attempts
from tests.support.forking import Tell, forked
from tests.support.killed_saves import OF_KILLED_SAVES, assert_holds, die, names, save_under
from tests.support.overwritten import OwnFiles

pytestmark = OF_KILLED_SAVES
OLD, NEW, NEXT = ({"w": np.arange(length)} for length in (4, 5, 6))
PARTS = {"state": OLD, "own": OwnFiles()}


def killed_at(call: int, checkpoint: Path) -> bool:
    """Clean up in a process that dies before a removal, rename or sync; return whether it was killed."""
    calls = list[tuple[str, ...]]()

    def work(tell: Tell) -> None:
        for name in ("remove", "rename", "sync"):
            pytest.MonkeyPatch().setattr(LocalBackend, name, counted(getattr(LocalBackend, name)))
        remove_dead_attempts(LocalBackend(), str(checkpoint))

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def do(self: LocalBackend, *paths: str) -> None:
            calls.append(paths)
            if len(calls) > call:
                die()
            real(self, *paths)

        return do

    reported, status = forked(work)
    assert reported == []
    return status == -signal.SIGKILL


def test_leftover_of_exchange_is_removed_despite_kill(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for call in range(20):
        checkpoint = tmp_path / str(call) / "c"
        jct.save(checkpoint, NEW)
        save_under(Path(side_name(str(checkpoint))), PARTS)
        was_killed = killed_at(call, checkpoint)
        jct.save(checkpoint, NEXT, overwrite=True)
        assert_holds(checkpoint, NEXT)
        assert names(checkpoint.parent) == ["c"]
        if not was_killed:
            break
    assert 4 < call < 19
    assert caplog.messages == []
