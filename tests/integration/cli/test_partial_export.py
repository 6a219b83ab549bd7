"""Which checkpointable `jaxckpt export` and `import` take, and which they report as left out."""

from __future__ import annotations

from pathlib import Path

import grain
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.cli.main import app
from tests.integration.cli.test_convert import run
from tests.support.commands import json_of
from tests.support.same_trees import assert_same, raw


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_position_in_data_is_named_as_left_out(tmp_path: Path, to: str) -> None:
    data = iter(grain.MapDataset.range(10).to_iter_dataset())
    next(data)
    jct.save_checkpointables(tmp_path / "a", {"state": {"w": np.ones(3)}, "data": data})
    arguments = ["export", str(tmp_path / "a"), str(tmp_path / "b"), "--to", to]
    result = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert result.stdout == f"{tmp_path / 'b'}: would have 1 leaf, 24 B\n"
    assert result.stderr.startswith("left out, ")
    assert result.stderr.endswith(": 'data'\n")
    found = json_of(*arguments, "--dry-run")
    assert (found["leaves"], found["bytes"], found["left_out"]) == (1, 24, ["data"])
    assert not (tmp_path / "b").exists()
    assert json_of(*arguments)["left_out"] == ["data"]
    assert jct.load(tmp_path / "b")["w"].tolist() == [1, 1, 1]
    assert json_of(*arguments[:2], tmp_path / "c", *arguments[3:], "--part", "state")["left_out"] == []


def test_default_part_is_the_documented_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert "Default: 'state', or the only tree" in run("export", "--help")
    assert "Default: all; operations change 'state' or the only tree" in run("import", "--help")
    trees = {name: {"w": np.full(3, value)} for value, name in enumerate(("a", "state"))}
    jct.save_checkpointables(tmp_path / "both", trees)
    run("export", tmp_path / "both", tmp_path / "hf", "--to", "safetensors")
    assert {name: raw(leaf) for name, leaf in jct.load(tmp_path / "hf").items()} == {"w": raw(trees["state"]["w"])}
    run("import", tmp_path / "both", tmp_path / "ours", "--op", "rename w v")
    assert_same(jct.load_checkpointables(tmp_path / "ours"), {"a": trees["a"], "state": {"v": trees["state"]["w"]}})


def test_part_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    data = iter(grain.MapDataset.range(10).to_iter_dataset())
    jct.save_checkpointables(tmp_path / "a", {"state": {"w": np.ones(3)}, "data": data})
    for command in (["export", "--to", "orbax"], ["import"]):
        message = run(*command, tmp_path / "a", tmp_path / "b", "--part", "data", code=2)
        assert "found 'data', which is of kind 'grain" in message
        assert "the trees are 'state'" in message


def test_checkpoint_without_a_tree_is_refused(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "a", {"cfg": jct.JsonValue({"lr": 1})})
    for command in (["export", "--to", "orbax"], ["import"]):
        message = json_of(*command, tmp_path / "a", tmp_path / "b", code=2)["message"]
        assert message.startswith(f"{tmp_path / 'a'}: ")
        assert message.endswith("found none; it has 'cfg'")
    assert not (tmp_path / "b").exists()
