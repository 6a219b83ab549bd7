"""Readers of a checkpoint that is replaced by several renames, on systems that cannot swap two names."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct

pytestmark = pytest.mark.timeout(120)
READS: list[Callable[[Path], Any]] = [jct.load, jct.verify, jct.metadata]


def replacements(root: Path) -> Iterator[None]:
    """Replace the checkpoint twice, in the steps of `LocalBackend.exchange`."""
    for number in (1, 2):
        (root / "c").rename(root / ".c.aside")
        yield
        (root / f"new{number}").rename(root / "c")
        yield
        (root / ".c.aside").rename(root / f"old{number}")
        yield


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("read", READS)
def test_replacement_during_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any], every: int
) -> None:
    opens, turn = os.open, threading.Lock()
    for number, name in enumerate(["c0", "new1", "new2"]):
        jct.save(tmp_path / name, {"w": np.full(1000, number)}, settings=jct.StoreSettings(durability="none"))
    for first in range(1, 25):
        root = tmp_path / f"at{first}"
        root.mkdir()
        for name, source in (("c", "c0"), ("new1", "new1"), ("new2", "new2")):
            shutil.copytree(tmp_path / source, root / name)
        steps, opened = replacements(root), itertools.count(1)

        def open_and_replace(
            path: Any, *more: Any, begin: int = first, steps: Any = steps, opened: Any = opened, **options: Any
        ) -> int:
            with turn:
                if threading.current_thread().name.startswith("jaxckpt"):
                    number = next(opened) - begin
                    if number >= 0 and number % every == 0:
                        next(steps, None)
            return opens(path, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", open_and_replace)
            found = read(root / "c")
        if read is jct.load:
            assert len(set(found["w"])) == 1
        elif read is jct.verify:
            assert found.problems == ()
        else:
            assert found.checkpointables["state"].bytes == 8000
