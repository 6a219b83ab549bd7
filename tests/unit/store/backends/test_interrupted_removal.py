"""Removal of a directory during which a signal interrupts calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.killed_saves import OF_KILLED_SAVES, names

pytestmark = OF_KILLED_SAVES


def test_listing_that_signal_interrupts_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    listed, interrupts = os.scandir, [4, 2]

    def scandir(path: int) -> Any:
        if interrupts and (number := interrupts.pop()) == 2:
            raise InterruptedError(number, "Interrupted system call")
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    LocalBackend().remove(str(tmp_path / "tree"))
    assert names(tmp_path) == []
