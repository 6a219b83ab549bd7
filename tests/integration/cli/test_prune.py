"""`jaxckpt prune`: a run that another process owns is not changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.commands import OWNER, json_of, printed, refused
from tests.support.runs import (
    made_run,
    talking_to,
)


def going(found: dict[str, Any]) -> list[int]:
    return [each["step"] for each in found["steps"] if each["goes"]]


def test_a_live_owner_is_not_pruned(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    with talking_to(OWNER, directory) as owner:
        assert owner.read() == "owned"
        found = json_of("prune", directory, "--keep-latest", 1)
        assert found["owner"].startswith(f"process {owner.process.pid} on ")
        assert "--yes is refused" in printed("prune", directory, "--keep-latest", 1)
        message = refused("prune", directory, "--keep-latest", 1, "--yes", code=4)
        assert f"owned by process {owner.process.pid}" in message
        assert len(list(directory.glob("step-*"))) == 2
    assert going(json_of("prune", directory, "--keep-latest", 1, "--yes")) == [1]
