"""train_lm.py: a training continues on another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct

SMALL = ("layers=1", "width=32", "heads=4", "window=32", "batch_size=8", "checkpoint.directory=run")


def losses_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("update ")]


def shardings(path: Path) -> Mapping[str, Any]:
    return {name: leaf.sharding for name, leaf in jct.metadata(path).checkpointables["state"].leaves.items()}


@pytest.fixture(scope="module")
def in_one_go(run_example: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory and the losses of six updates."""
    cwd = tmp_path_factory.mktemp("in-one-go")
    return cwd, losses_in(run_example("train_lm.py", "steps=6", *SMALL, cwd=cwd))


def test_training_continues_on_another_mesh(in_one_go: tuple[Path, list[str]], run_example: Any) -> None:
    cwd, losses = in_one_go
    output = run_example("train_lm.py", "steps=7", "mesh=[2,4]", *SMALL, cwd=cwd)
    assert "starting after 6 of 7 updates" in output
    (after,) = losses_in(output)
    assert float(after.split()[3]) < float(losses[0].split()[3])
    meshes = [sharding["mesh"] for sharding in shardings(cwd / "run" / "step-0000000007").values() if sharding]
    assert meshes.count({"fsdp": 2, "tensor": 4}) == len(meshes) > 0
