"""On a file system whose files can share blocks, copies and steps share them, but no damage."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.nightly.faults.loop_disk import loop_disk, why_not
from tests.support.commands import json_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_not("xfs") is not None, reason=str(why_not("xfs"))),
]

MIB = 1 << 20
BASE = 24 * MIB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with loop_disk(tmp_path, "xfs") as made:
        made.make_new()
        yield made.path


def used_bytes(disk: Path) -> int:
    os.sync()
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def saved_run(directory: Path, *steps: int) -> None:
    base = jnp.full(BASE // 4, 7, jnp.float32)
    with jct.StepManager(directory, frozen="base") as manager:
        for step in steps:
            manager.save(step, {"state": {"base": base, "step": jnp.asarray(step)}})
            manager.wait()


def damage(step: Path) -> None:
    """Change a byte of the largest file in place."""
    largest = max(step.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


def test_copy_shares_blocks_but_no_damage(disk: Path, tmp_path: Path) -> None:
    saved_run(disk / "run", 1)
    before = used_bytes(disk)
    json_of("cp", disk / "run", disk / "copy", "--check")
    assert used_bytes(disk) - before < BASE // 4
    json_of("cp", disk / "run", tmp_path / "elsewhere")
    damage(disk / "run" / "step-0000000001")
    assert not jct.verify(disk / "run" / "step-0000000001").ok
    for copy in (disk / "copy", tmp_path / "elsewhere"):
        assert jct.verify(copy).ok
        assert np.asarray(jct.load(copy)["base"]).tobytes() == np.full(BASE // 4, 7, np.float32).tobytes()


def test_steps_share_blocks_where_links_are_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*paths: object, **options: object) -> NoReturn:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    before = used_bytes(disk)
    saved_run(disk / "run", 1, 2, 3)
    assert used_bytes(disk) - before < BASE + BASE // 4
    steps = sorted((disk / "run").glob("step-*"))
    damage(steps[1])
    assert [jct.verify(step).ok for step in steps] == [True, False, True]
