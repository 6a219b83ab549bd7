"""Trees that are too deep are refused with an error of the package, and the process continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.nnx  # noqa: F401  # with it, JAX walks each tree in search of its objects
import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import SettingsError, UnsupportedLeafError


class Pair(NamedTuple):
    left: int
    right: Any


def itself(make: Callable[[Any], Any]) -> Any:
    found: list[Any] = []
    found.append(make(found))
    return found


def deep(make: Callable[[Any], Any], depth: int = 5000) -> Any:
    tree: Any = np.ones(2)
    for _ in range(depth):
        tree = make(tree)
    return tree


MAKERS: list[Callable[[Any], Any]] = [
    lambda tree: {"a": tree},
    lambda tree: [1, tree],
    lambda tree: (tree,),
    lambda tree: Pair(1, tree),
    lambda tree: {"a": 1, "b": [tree, {}]},
]
TREES = [lambda make=make: deep(make) for make in MAKERS] + [lambda: itself(lambda tree: {"again": tree})]


class Counter:
    """An object whose state is the given tree."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def get_state(self) -> Any:
        return self.tree

    def set_state(self, state: Any) -> None:
        raise AssertionError


def in_a_run(path: Path, tree: Any) -> None:
    with jct.StepManager(path / "run") as manager:
        manager.save(1, {"state": tree})


def in_a_loop(path: Path, tree: Any) -> None:
    with jct.CheckpointCallback(path / "loop", save_interval_steps=1) as ckpt:
        ckpt.resume({"a": 1})
        for _ in ckpt.steps(1):
            ckpt(tree)


def as_target_of_a_loop(path: Path, tree: Any) -> None:
    in_a_loop(path, {"a": 1})
    with jct.CheckpointCallback(path / "loop", save_interval_steps=1) as ckpt:
        ckpt.resume(tree)


WAYS: list[Callable[[Path, Any], object]] = [
    lambda path, tree: jct.save(path / "b", tree),
    lambda path, tree: jct.save_checkpointables(path / "b", {"counter": Counter(tree)}),
    lambda path, tree: jct.save_checkpointables(path / "b", {"json": jct.JsonValue(tree)}),
    lambda path, tree: jct.load(path / "a", tree),
    lambda path, tree: jct.load(path / "a", shardings=tree),
    lambda path, tree: jct.load_checkpointables(path / "a", {"state": tree}),
    in_a_run,
    in_a_loop,
    as_target_of_a_loop,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", TREES)
def test_tree_that_is_too_deep_is_refused_everywhere(
    make: Callable[[], Any], way: Callable[[Path, Any], object], tmp_path: Path
) -> None:
    jct.save(tmp_path / "a", {"a": np.arange(3)})
    with pytest.raises(UnsupportedLeafError):
        way(tmp_path, make())
    jct.save(tmp_path / "c", deep(MAKERS[0], 100))  # the process continues
    assert jax.tree.leaves(jct.load(tmp_path / "c"))[0].tolist() == [1.0, 1.0]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", ["transforms", "rename", "only"])
@pytest.mark.parametrize("make", MAKERS[:3])
def test_too_deep_arguments_are_refused(name: str, make: Callable[[Any], Any], tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"a": np.arange(3)})
    if name == "only" and isinstance(deep(make, 1), dict):
        pytest.skip("a collection of texts")
    with pytest.raises(SettingsError, match=name):
        jct.load(tmp_path / "a", **{name: deep(make)})


def test_shared_container_is_not_walked_repeatedly(tmp_path: Path) -> None:
    tree: Any = {"w": np.ones(2)}
    for _ in range(500):
        tree = [tree, tree]
    with pytest.raises(UnsupportedLeafError):
        jct.save(tmp_path / "a", tree)
