"""The commands say what a save wrote, and what a deletion frees, if steps share files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local_names import shared_bytes
from tests.support.commands import run

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> str:
    base = jnp.ones(MIB // 2)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1, frozen=["base"], progress=False) as ckpt:
        state = ckpt.resume({"base": base, "w": jnp.zeros(100)})
        for step in ckpt.steps(4):
            state = {**state, "w": jnp.full(100, step)}
            ckpt(state)
    return str(tmp_path / "run")


def test_ls_shows_written_bytes(directory: str) -> None:
    header, *rows = run("ls", directory).output.splitlines()
    assert header.split()[:3] == ["step", "size", "written"]
    assert len(rows) == 4
    steps = json.loads(run("ls", directory, "--json").output)["steps"]
    assert steps[0]["written_bytes"] == steps[0]["bytes"] > 2 * MIB
    assert all(step["written_bytes"] < 100_000 < 2 * MIB < step["bytes"] for step in steps[1:])


def test_ls_of_run_that_shares_nothing_has_one_size(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(1, {"state": {"w": jnp.ones(3)}})
    assert "written" not in run("ls", str(tmp_path / "run")).output


def test_prune_counts_a_shared_file_only_if_it_goes(directory: str) -> None:
    plan = json.loads(run("prune", directory, "--keep-latest", "1", "--json").output)
    assert [step["goes"] for step in plan["steps"]] == [True, True, True, False]
    assert 0 < plan["bytes"] < 100_000
    done = json.loads(run("prune", directory, "--keep-latest", "1", "--yes", "--json").output)
    assert done["bytes"] == plan["bytes"]
    assert jct.verify(jct.StepManager(directory).path(4)).ok


def test_prune_frees_nothing_that_a_linked_copy_has(tmp_path: Path, directory: str) -> None:
    shutil.copytree(directory, tmp_path / "copy", copy_function=os.link)
    assert json.loads(run("prune", directory, "--keep-latest", "1", "--json").output)["bytes"] == 0


def test_copy_shares_nothing(tmp_path: Path, directory: str) -> None:
    (tmp_path / "other").mkdir()
    run("cp", jct.StepManager(directory).path(4), str(tmp_path / "other" / "step-0000000004"))
    (step,) = json.loads(run("ls", str(tmp_path / "other"), "--json").output)["steps"]
    assert step["written_bytes"] == step["bytes"] > 2 * MIB


def test_removed_run_frees_a_shared_file_once(tmp_path: Path, directory: str) -> None:
    steps = [jct.StepManager(directory).path(step) for step in range(1, 5)]
    total = sum(file.stat().st_size for step in steps for file in Path(step).rglob("*.safetensors"))
    assert total > 8 * MIB
    assert 2 * MIB < total - shared_bytes(steps) < 3 * MIB
    assert shared_bytes(steps[:1]) > 2 * MIB
    assert shared_bytes([str(tmp_path / "gone")]) == 0
