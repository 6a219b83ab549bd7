"""`jaxckpt pin`: a run that another process owns is not changed."""

from __future__ import annotations

from pathlib import Path

import jaxckpt_train as jct
from tests.support.commands import OWNER, refused
from tests.support.runs import made_run, talking_to


def pinned(directory: Path) -> list[int]:
    return [info.step for info in jct.StepManager(directory).infos if info.pinned]


def test_run_with_live_owner_is_not_pinned(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    with talking_to(OWNER, directory) as owner:
        assert owner.read() == "owned"
        assert f"owned by process {owner.process.pid}" in refused("pin", directory, 1, code=4)
        assert pinned(directory) == []
