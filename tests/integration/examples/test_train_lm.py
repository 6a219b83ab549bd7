"""train_lm.py: a restart after three of six updates changes nothing, and shards keep their places."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct

SMALL = ("layers=1", "width=32", "heads=4", "window=32", "batch_size=8", "checkpoint.directory=run")


def losses_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("update ")]


def leaves(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for name, leaf in jax.tree_util.tree_leaves_with_path(jct.load(path)):
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        found[jax.tree_util.keystr(name, simple=True, separator="/")] = (
            str(array.dtype),
            array.shape,
            array.tobytes(),
        )
    return found


def shardings(path: Path) -> Mapping[str, Any]:
    return {name: leaf.sharding for name, leaf in jct.metadata(path).checkpointables["state"].leaves.items()}


@pytest.fixture(scope="module")
def in_one_go(run_example: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory and the losses of six updates."""
    cwd = tmp_path_factory.mktemp("in-one-go")
    return cwd, losses_in(run_example("train_lm.py", "steps=6", "checkpoint.save_interval_steps=3", *SMALL, cwd=cwd))


def test_restarted_training_resumes_exactly(
    in_one_go: tuple[Path, list[str]], run_example: Any, tmp_path: Path
) -> None:
    cwd, losses = in_one_go
    shutil.copytree(cwd, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "step-0000000006")
    second = run_example("train_lm.py", "steps=6", *SMALL, cwd=tmp_path)
    assert "starting after 3 of 6 updates" in second
    assert len(losses) == len(set(losses)) == 6
    assert losses_in(second) == losses[3:]
    ours, expected = (leaves(place / "run" / "step-0000000006") for place in (tmp_path, cwd))
    assert ours == expected
    position = Path("run", "step-0000000006", "data", "p00000.json")
    assert (tmp_path / position).read_bytes() == (cwd / position).read_bytes()


def test_saved_state_keeps_shardings_and_rng_counts(
    in_one_go: tuple[Path, list[str]],
) -> None:
    step = in_one_go[0] / "run" / "step-0000000006"
    split = {name: sharding for name, sharding in shardings(step).items() if name.endswith("up/kernel")}
    assert len(split) == 3, "the kernel and its two moments"
    assert all(one == {"mesh": {"fsdp": 4, "tensor": 2}, "spec": ["fsdp", "tensor"]} for one in split.values()), split
    counts = [np.frombuffer(data, dtype)[0] for name, (dtype, _, data) in leaves(step).items() if "rngs/count" in name]
    assert counts == [12], "two dropouts in each of six updates"
