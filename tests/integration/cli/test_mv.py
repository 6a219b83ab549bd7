"""`jaxckpt mv`: a step of a running run is not moved."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import OWNER, json_of, refused
from tests.support.runs import (
    made_run,
    talking_to,
)


def test_step_of_running_run_is_not_moved(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    with talking_to(OWNER, directory) as owner:
        assert owner.read() == "owned"
        message = refused("mv", directory, tmp_path / "new", "--step", 1, code=4)
        assert f"owned by process {owner.process.pid}" in message
        assert not (tmp_path / "new").exists()
    assert json_of("mv", directory, tmp_path / "new", "--step", 1)["removed"] is True
