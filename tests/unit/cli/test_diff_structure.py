"""`jaxckpt diff`: differences in containers and in other checkpointables, and the selection of both."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from tests.support.commands import json_of, printed, refused
from tests.support.runs import folder_of, made_run

STATE = {"w": np.arange(6.0)}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")


class Point(NamedTuple):
    x: Any
    y: Any


class Other(NamedTuple):
    x: Any
    y: Any


class Files:
    """Writes files of its own, as Orbax's protocol requires."""

    def __init__(self, **contents: bytes) -> None:
        self.contents = contents

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            path = await directory.await_creation()
            for name, content in self.contents.items():
                (path / name).write_bytes(content)

        return write()

    async def load(self, directory: Any) -> Any:
        raise NotImplementedError


def found_in(a: Path, b: Path, *options: str, code: int = 1) -> dict[str, dict[str, Any]]:
    differences = json_of("diff", a, b, *options, code=code)["differences"]
    names = [each["part"] if each["path"] == "" else f"{each['part']}/{each['path']}" for each in differences]
    assert len(set(names)) == len(names)
    return dict(zip(names, differences, strict=True))


def saved(path: Path, parts: dict[str, Any], **settings: Any) -> Path:
    jct.save_checkpointables(path, parts, settings=jct.StoreSettings(**settings) if settings else None)
    return path


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256"])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (jct.JsonValue({"epoch": 1}), jct.JsonValue({"epoch": 2})),
        (jct.PerProcess({"epoch": 1}), jct.PerProcess({"epoch": 2.5})),
        (Files(one=b"same", two=b"before"), Files(one=b"same", two=b"behind")),
    ],
    ids=["JSON", "per process", "files"],
)
def test_other_checkpointables_are_compared_by_value(tmp_path: Path, a: Any, b: Any, digest: str) -> None:
    """Digests of the same kind are compared; otherwise the bytes are."""
    first = saved(tmp_path / "a", {"state": STATE, "data": a})
    second = saved(tmp_path / "b", {"state": STATE, "data": b}, digest=digest)
    third = saved(tmp_path / "c", {"state": STATE, "data": a}, digest=digest)
    found = found_in(first, second)
    assert list(found) == ["data"]
    count = 2 if isinstance(a, Files) else 1
    assert (found["data"]["part"], found["data"]["path"], found["data"]["kind"]) == ("data", "", "value")
    assert (found["data"]["differing"], found["data"]["count"], found["data"]["max_abs"]) == (1, count, None)
    assert f"1 of {count} files" in printed("diff", first, second, code=1)
    assert found_in(first, third, code=0) == {}
    assert printed("diff", first, third).startswith("1 leaf and 1 other checkpointable ")


def test_items_without_tree_are_compared(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"state": STATE, "old": jct.JsonValue(1), "data": jct.JsonValue(1), "was": {"n": 3}})
    b = saved(tmp_path / "b", {"state": STATE, "new": jct.JsonValue(1), "data": jct.PerProcess(1), "was": Files(n=b"")})
    found = found_in(a, b)
    assert {name: (each["kind"], each["a"], each["b"]) for name, each in found.items()} == {
        "old": ("only_a", "json", None),
        "new": ("only_b", None, "json"),
        "data": ("form", "json", "per_process"),
        "was": ("form", "pytree", "stateful"),
        "was/n": ("only_a", "Python int", None),
    }
    lines = {line.split()[0]: " ".join(line.split()) for line in printed("diff", a, b, code=1).splitlines()}
    assert lines["old"] == "old only in the first: json"
    assert lines["data"] == "data json -> per_process"
    assert lines["1"] == "1 leaf is equal, 5 differ"


def test_file_names_are_compared_too(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"own": Files(one=b"1", two=b"2")})
    b = saved(tmp_path / "b", {"own": Files(one=b"1", three=b"2")})
    assert (found_in(a, b)["own"]["differing"], found_in(a, b)["own"]["count"]) == (2, 3)


def test_damaged_opaque_file_exits_with_1(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"own": Files(one=b"1234")})
    b = saved(tmp_path / "b", {"own": Files(one=b"1234")}, digest="sha256")
    (folder_of(b) / "own" / "one").write_bytes(b"1235")
    assert "own/one" in refused("diff", a, b, code=1)


def orbax_step(directory: Path, position: int, note: Any = "same") -> Path:
    logging.getLogger("absl").setLevel(logging.ERROR)
    iterator = iter(grain.MapDataset.range(20).to_iter_dataset())
    for _ in range(position):
        next(iterator)
    with ocp.CheckpointManager(directory) as manager:
        items = {
            "state": ocp.args.StandardSave(STATE),
            "data": grain.checkpoint.CheckpointSave(iterator),
            "note": ocp.args.JsonSave({"note": note, "a": [1, 2.5]}),
        }
        manager.save(7, args=ocp.args.Composite(**items))
    return directory / "7"


def test_positions_and_values_of_orbax_are_compared(tmp_path: Path) -> None:
    a, b, c = (orbax_step(tmp_path / name, at) for name, at in (("a", 2), ("b", 3), ("c", 2)))
    assert {name: each["kind"] for name, each in found_in(a, b).items()} == {"data": "value"}
    assert found_in(a, c, code=0) == {}
    d = orbax_step(tmp_path / "d", 2, "other")
    assert {name: each["kind"] for name, each in found_in(a, d).items()} == {"note": "value"}


def test_equal_json_values_of_different_tools_are_equal(tmp_path: Path) -> None:
    orbax = orbax_step(tmp_path / "a", 2)
    value = {"a": [1, 2.5], "note": "same"}
    assert json.dumps(value).encode() != next((orbax / "note").iterdir()).read_bytes()
    ours = saved(tmp_path / "b", {"note": jct.JsonValue(value), "state": STATE})
    assert {name: each["kind"] for name, each in found_in(orbax, ours).items()} == {"data": "only_a"}
    other = saved(tmp_path / "c", {"note": jct.JsonValue({**value, "a": [True, 2.5]}), "state": STATE})
    assert found_in(other, orbax, "--only", "note")["note"]["kind"] == "value"


ONE, TWO = np.ones(2), np.zeros(3)


@pytest.mark.parametrize(
    ("a", "b", "kind_a", "kind_b"),
    [
        ([ONE, TWO], (ONE, TWO), "list", "tuple"),
        ([ONE, TWO], {0: ONE, 1: TWO}, "list", "dict"),
        (Point(ONE, TWO), {"x": ONE, "y": TWO}, f"namedtuple {__name__}.Point", "dict"),
        (Point(ONE, TWO), Other(ONE, TWO), f"namedtuple {__name__}.Point", f"namedtuple {__name__}.Other"),
        (OrderedDict(x=ONE), {"x": ONE}, "object collections.OrderedDict", "dict"),
        ({}, [], "dict", "list"),
        ([], (), "list", "tuple"),
        ((), {}, "tuple", "dict"),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "root"])
def test_containers_of_other_kinds_differ(
    tmp_path: Path, a: Any, b: Any, kind_a: str, kind_b: str, inside: bool
) -> None:
    for name, value in (("a", a), ("b", b)):
        jct.save(tmp_path / name, {"c": value, "same": (1, [2])} if inside else value)
    path = "c" if inside else "~"
    found = found_in(tmp_path / "a", tmp_path / "b")
    assert {name: (each["kind"], each["a"], each["b"]) for name, each in found.items()} == {
        f"state/{path}": ("form", kind_a, kind_b)
    }
    assert f"state/{path} {kind_a} -> {kind_b}" in " ".join(
        printed("diff", tmp_path / "a", tmp_path / "b", code=1).split()
    )
    assert found_in(tmp_path / "a", tmp_path / "a", code=0) == {}


def test_leaf_and_subtree_are_compared_by_leaves(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"c": [], "d": [{}]})
    jct.save(tmp_path / "b", {"c": {"x": 1}, "d": ([],)})
    found = found_in(tmp_path / "a", tmp_path / "b")
    assert {name: (each["kind"], each["a"], each["b"]) for name, each in found.items()} == {
        "state/c": ("only_a", "an empty container", None),
        "state/c/x": ("only_b", None, "Python int"),
        "state/d": ("form", "list", "tuple"),
        "state/d/0": ("form", "dict", "list"),
    }


def test_containers_are_chosen_by_their_own_path(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"c": [1, 2], "d": 3})
    jct.save(tmp_path / "b", {"c": (1, 2), "d": 3})
    for only in ("state/**", "**"):
        assert list(found_in(tmp_path / "a", tmp_path / "b", "--only", only)) == ["state/c"]
    for only in ("c/0", "c/*", "d"):
        assert found_in(tmp_path / "a", tmp_path / "b", "--only", only, code=0) == {}


def test_containers_of_different_tools_are_not_compared(tmp_path: Path) -> None:
    """Orbax stores only some kinds of containers."""
    state = {"pair": (ONE, TWO), "point": Point(ONE, TWO)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
    jct.save(tmp_path / "ours", {"pair": [ONE, TWO], "point": {"x": ONE, "y": TWO}})
    assert found_in(tmp_path / "orbax", tmp_path / "ours", code=0) == {}


def test_only_selects_other_checkpointables_by_name(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"state": STATE, "data": jct.JsonValue(1)})
    b = saved(tmp_path / "b", {"state": STATE, "data": jct.JsonValue(2)})
    for only in ("data", "data/**", "d*", "**"):
        assert list(found_in(a, b, "--only", only)) == ["data"]
    assert found_in(a, b, "--only", "w", code=0) == {}


@pytest.mark.parametrize("more", [[], ["--only", "w"]])
def test_pattern_that_selects_nothing_exits_with_2(tmp_path: Path, more: list[str]) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    message = refused("diff", run, run, "--step-a", 1, *more, "--only", "weights", code=2)
    assert "'weights' selects none of 2 leaves" in message
    assert 'did you mean "state/w"' not in message
    assert 'did you mean "step"?' in refused("diff", run, run, "--only", "stp", code=2)


def test_pattern_may_select_in_one_checkpoint_only(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": 1})
    jct.save(tmp_path / "b", {"w": 1, "new": 2})
    for a, b in (("a", "b"), ("b", "a")):
        assert list(found_in(tmp_path / a, tmp_path / b, "--only", "new")) == ["state/new"]
