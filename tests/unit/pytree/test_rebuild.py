"""Rebuilding a tree without a target: nested dicts, lists and tuples."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.pytree.leaves import EmptyLeaf, IntLeaf, TreeRecord
from jaxckpt_train.pytree.restore import rebuild


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    kernel: Any
    bias: Any


def test_without_target_objects_become_dicts_of_their_fields(tmp_path: Path) -> None:
    tree = {
        "point": Point(1, [2.5, "text"]),
        "weights": Weights(kernel=(np.arange(3), None), bias=b"raw"),
        "ordered": collections.OrderedDict(z=1, a=True),
        "numbers": {3: {}, 11: [], -1: ()},
    }
    jct.save(tmp_path / "c", tree)
    loaded = jct.load(tmp_path / "c")
    kernel = loaded["weights"]["kernel"]
    assert isinstance(kernel, tuple)
    assert kernel[0].tolist() == [0, 1, 2]
    assert kernel[1] is None
    loaded["weights"]["kernel"] = "seen"
    assert loaded == {
        "point": {"x": 1, "y": [2.5, "text"]},
        "weights": {"kernel": "seen", "bias": b"raw"},
        "ordered": {"z": 1, "a": True},
        "numbers": {3: {}, 11: [], -1: ()},
    }
    assert type(loaded["ordered"]) is dict


@pytest.mark.parametrize("root", [{}, [], (), None, 3, "text", [[]], ({},), {"a": {}}])
def test_any_root_comes_back(root: Any, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", root)
    assert jct.load(tmp_path / "c") == root
    assert type(jct.load(tmp_path / "c")) is type(root)


def test_more_than_ten_positions_stay_in_order(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"list": list(range(25)), "tuple": tuple(range(25))})
    assert jct.load(tmp_path / "c") == {"list": list(range(25)), "tuple": tuple(range(25))}


def test_selected_leaves_keep_their_positions(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"params": {"w": 1}, "opt": [{"mu": 2, "nu": 3}, {"mu": 4}, 5], "deep": {"a": {"b": 6}}})
    assert jct.load(tmp_path / "c", only="params/**") == {"params": {"w": 1}}
    assert jct.load(tmp_path / "c", only="opt/1/**") == {"opt": [jct.PLACEHOLDER, {"mu": 4}, jct.PLACEHOLDER]}
    assert jct.load(tmp_path / "c", only=["**/mu"]) == {"opt": [{"mu": 2}, {"mu": 4}, jct.PLACEHOLDER]}


LEAF = IntLeaf("1")


@pytest.mark.parametrize(
    ("containers", "leaves", "reason"),
    [
        ({}, {"a": LEAF, "a/b": LEAF}, "'a/b' is below another leaf"),
        ({}, {"a/b": LEAF, "a": LEAF}, "'a' is also a container"),
        ({}, {"~": LEAF, "a": LEAF}, "expected no other leaf than the root, found 1 more"),
        ({"a": "list"}, {"a/0": LEAF, "a/2": LEAF}, "positions of the list 'a' are missing"),
        ({"a": "tuple"}, {"a/x": LEAF}, "positions of the tuple 'a' are missing"),
        ({"a": "list"}, {"a/00": LEAF}, "are missing"),
        ({}, {"a/~fzz": LEAF}, "'~fzz' below 'a' is not a key: invalid hexadecimal"),
        ({}, {"~f0x1p99999": LEAF}, "below '~' is not a key: hexadecimal value too large"),
        ({}, {"9" * 5000: LEAF}, "is not a key: Exceeds the limit"),
        ({}, {"~t1," + "9" * 5000: LEAF}, "is not a key: Exceeds the limit"),
        ({}, {"~t" * 5000: LEAF}, "is not a key: a tuple within a tuple"),
    ],
)
def test_paths_that_contradict_each_other_are_corrupt(containers: Any, leaves: Any, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"here: .*{reason}"):
        rebuild(TreeRecord(containers, leaves), dict.fromkeys(leaves, 1), "here")


def test_unknown_kind_of_container_is_read_as_dict() -> None:
    record = TreeRecord({"a": "object evil.Type", "b": "frozen"}, {"a/x": LEAF, "b": EmptyLeaf()})
    assert rebuild(record, {"a/x": 1, "b": None}, "here") == {"a": {"x": 1}, "b": {}}
