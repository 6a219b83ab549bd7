"""Nodes that are registered without keys: values are never exchanged silently, and there are no false alarms."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.flatten import describe, flatten, static_difference

FAST = jct.StoreSettings(durability="none")


class D(dict[Any, Any]):
    """A mapping whose keys JAX does not know."""


class Views(dict[Any, Any]):
    """As D, but its static data is a view of the keys, which has no hash and ignores their order in `==`."""


class Block:
    """Fields by position; the static data has their names and settings."""

    def __init__(self, fields: dict[str, Any], **settings: Any) -> None:
        self.fields, self.settings = fields, settings


jax.tree_util.register_pytree_node(
    D, lambda x: (tuple(x.values()), tuple(x)), lambda keys, values: D(zip(keys, values, strict=True))
)
jax.tree_util.register_pytree_node(
    Views, lambda x: (tuple(x.values()), x.keys()), lambda keys, values: Views(zip(keys, values, strict=True))
)
jax.tree_util.register_pytree_node(
    Block,
    lambda x: (tuple(x.fields.values()), (tuple(x.fields), x.settings)),
    lambda static, values: Block(dict(zip(static[0], values, strict=True)), **static[1]),
)


class Part(enum.Enum):
    W = 1
    B = 2


def two(a: Any, b: Any, kind: Callable[..., Any]) -> Any:
    return kind({a: jnp.zeros(2), b: jnp.ones(2)})


@pytest.mark.parametrize("kind", [D, Views, Block, lambda fields: {"deep": [Block(fields, depth=2)]}])
@pytest.mark.parametrize(
    ("saved", "wanted"), [("wb", "bw"), ("wb", "bc"), ((1, 2), (2, 1)), ((Part.W, Part.B), (Part.B, Part.W))]
)
def test_values_that_would_change_places_are_refused(kind: Any, saved: Any, wanted: Any, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", two(*saved, kind), settings=FAST)
    assert jax.tree.leaves(jct.load(tmp_path / "c", two(*saved, kind)))[1].tolist() == [1, 1]
    with pytest.raises(jct.MismatchError, match=r"node '.*'"):
        jct.load(tmp_path / "c", two(*wanted, kind))


def test_renamed_positions_are_loaded_as_the_caller_says(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"d": D(w=jnp.zeros(2), b=jnp.ones(2))}, settings=FAST)
    target = {"d": D(b=jnp.zeros(2), w=jnp.zeros(2))}
    found = jct.load(tmp_path / "c", target, rename={"d/0": "d/1", "d/1": "d/0"})["d"]
    assert (found["w"].tolist(), found["b"].tolist()) == ([0, 0], [1, 1])
    only = jct.load(tmp_path / "c", {**target, "e": jnp.zeros(1)}, only="e", missing="keep")
    assert only["d"] is not None


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (Block({"w": 1, "b": 2}, rate=0.1), Block({"w": 1, "b": 2}, rate=0.2)),
        (D(w=1, b=2), D(w=1, c=2)),
        (Block({"w": 1}, kinds=["relu", "same"]), Block({"w": 1}, kinds=["same"])),
    ],
)
def test_other_static_data_is_one_warning(
    saved: Any, wanted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jct.save(tmp_path / "c", {"n": saved}, settings=FAST)
    assert jax.tree.leaves(jct.load(tmp_path / "c", {"n": wanted})) == jax.tree.leaves(saved)
    assert ["node 'n'" in message for message in caplog.messages] == [True]


class Opaque:
    """Compared by identity, with an address in its repr."""


def other_function() -> None:
    pass


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (test_other_static_data_is_one_warning, other_function),
        (lambda x: x, lambda x: -x),
        (functools.partial(other_function), functools.partial(jnp.sin)),
        (Opaque(), Opaque()),
        (float("nan"), float("nan")),
        (np.arange(3), np.arange(4)),
        (jnp.float32, jnp.bfloat16),
        ({"relu": other_function}, {"relu": Opaque()}),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        (1, True),
        (1.0, 1),
        ((1, "x"), [1, "x"]),
        ({1: "x"}, {2: "x"}),
        ("x" * 100_000, "y" * 100_000),
        ([10**5000], [10**5001]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unstable_static_data_is_not_compared(
    saved: Any, wanted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jct.save(tmp_path / "c", Block({"w": 3}, static=saved), settings=FAST)
    assert jct.load(tmp_path / "c", Block({"w": 0}, static=wanted)).fields == {"w": 3}
    assert not caplog.messages


def test_nodes_with_keys_may_change_their_static_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @flax.struct.dataclass
    class State:
        w: Any
        apply_fn: Any = flax.struct.field(pytree_node=False)
        name: str = flax.struct.field(pytree_node=False)

    jct.save(tmp_path / "c", State(3, lambda: 1, "a"), settings=FAST)
    assert jct.load(tmp_path / "c", State(0, other_function, "b")).w == 3
    assert not flatten(State(3, lambda: 1, "a")).static
    assert not caplog.messages


def test_static_data_of_large_tree_is_never_stale(tmp_path: Path) -> None:
    names = [f"k{number}" for number in range(100)]
    for kind in (D, Views):
        for order in (names, names[::-1], names):
            tree = kind({name: int(name[1:]) for name in order})
            path = tmp_path / f"{kind.__name__}{order[0]}"
            jct.save(path, tree, overwrite=True, settings=FAST)
            assert jct.load(path, tree) == tree
        with pytest.raises(jct.MismatchError):
            jct.load(path, kind.fromkeys(names[::-1], 0))


def test_checkpoints_without_static_record_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("jaxckpt_train.pytree.flatten.describe", lambda static, children: None)
        jct.save(tmp_path / "c", D(w=0, b=1), settings=FAST)
    assert '"static":' not in (tmp_path / "c" / "manifest.json").read_text()
    assert jct.load(tmp_path / "c", D(b=0, w=0)) == {"b": 0, "w": 1}


def test_descriptions_are_the_same_in_each_process() -> None:
    program = (
        "import enum; from jaxckpt_train.pytree.flatten import describe\n"
        "Kind = enum.Enum('Kind', 'A B')\n"
        "print(describe((('w', 'b'), {'z': 1, 'a': [None, 2.5, {1, 2}]}, {'x', 'y'}, lambda: 0, object(), Kind.A), 2))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert found == {'[["w","b"],{"dict":{"a":[null,2.5,{}],"z":1}},{},{},{},["enum","Kind","A"]]\n'}


def test_records_of_a_later_version_are_not_compared() -> None:
    now = describe(("w", "b"), 2)
    assert now is not None
    assert static_difference("not JSON", now, 2) is None
    assert static_difference("[" * 100_000, now, 2) is None
