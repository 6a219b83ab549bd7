"""Round trips: every kind of leaf and container is restored exactly, with a target and without."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train.pytree._jax import enable_x64
from jaxckpt_train.store.segment import DTYPES
from tests.support.same_trees import assert_same, raw

FAST = jct.StoreSettings(durability="none")
WIDE = ("float64", "int64", "uint64", "complex128")
NOT_IN_JAX = ("complex32", "bcomplex32", "int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
JAX_DTYPES = [name for name in DTYPES if name not in NOT_IN_JAX]
IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def patterns(name: str) -> np.ndarray:
    """Return many values of a dtype, including nan payloads and both zeros."""
    dtype = DTYPES[name]
    if name == "bool":
        return np.array([True, False, True])
    bits = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}.get(name, 8)
    bits = 6 if name.startswith("float6") else bits
    if name.startswith("int") and bits < 8:
        return np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(dtype)
    if dtype.itemsize == 1:
        return np.arange(2**bits, dtype=np.uint8).view(dtype)
    return np.random.default_rng(0).integers(0, 256, 64 * dtype.itemsize, np.uint8).view(dtype)


def round_trip(tree: Any, path: Path, like: Any = None, **options: Any) -> Any:
    jct.save(path, tree, settings=FAST)
    return jct.load(path, like, **options)


@pytest.mark.parametrize("name", JAX_DTYPES)
def test_jax_arrays_of_every_dtype(name: str, tmp_path: Path) -> None:
    values = patterns(name)
    with enable_x64(name in WIDE):
        full = jnp.asarray(values)
        assert full.dtype == DTYPES[name]
        tree = {
            "full": full,
            "matrix": jnp.asarray(values[: values.size // 3 * 3].reshape(3, -1)),
            "scalar": jnp.asarray(values[0]),
            "none": jnp.asarray(values[:0]),
            "flat": jnp.asarray(np.zeros((2, 0, 3), DTYPES[name])),
        }
        assert_same(round_trip(tree, tmp_path / "c", tree), tree)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        assert_same(jct.load(tmp_path / "c", abstract), tree)
        host = jax.tree.map(np.asarray, tree)
    assert_same(jct.load(tmp_path / "c"), host)  # numpy needs no 64-bit mode of JAX
    assert_same(jct.load(tmp_path / "c", host), host)
    assert raw(tree["full"]) == values.tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_arrays_of_every_dtype(name: str, tmp_path: Path) -> None:
    values = patterns(name)
    tree = {"full": values, "scalar": values[0], "zero_d": values[0:1].reshape(()), "none": values[:0]}
    assert_same(round_trip(tree, tmp_path / "c", tree), tree)
    assert_same(jct.load(tmp_path / "c"), tree)


@pytest.mark.parametrize("name", ["int16", "uint32", "float16", "float32", "float64", "complex64", "complex128"])
def test_big_endian_arrays_stay_big_endian(name: str, tmp_path: Path) -> None:
    native = patterns(name)
    big = native.astype(native.dtype.newbyteorder(">"))
    tree = {"big": big, "zero_d": big[:1].reshape(())}
    found = round_trip(tree, tmp_path / "c")
    assert found["big"].dtype.byteorder == ">"
    assert_same(found, tree)
    assert_same(jct.load(tmp_path / "c", tree), tree)
    other = {"big": native, "zero_d": native[:1].reshape(())}
    assert_same(jct.load(tmp_path / "c", other), other)


def test_numpy_arrays_of_any_memory_layout(tmp_path: Path) -> None:
    base = np.arange(120.0).reshape(4, 5, 6)
    memory = np.memmap(tmp_path / "memory", np.int16, "w+", shape=(7, 3))
    memory[:] = np.arange(21).reshape(7, 3)
    frozen = np.arange(5)
    frozen.flags.writeable = False
    tree = {
        "columns": np.asfortranarray(base),
        "turned": base.transpose(2, 0, 1),
        "steps": base[::2, 1::3, ::-1],
        "repeated": np.broadcast_to(np.arange(3), (4, 3)),
        "unaligned": np.frombuffer(b"x" + np.arange(4.0).tobytes(), np.uint8)[1:].view(np.float64),
        "memory": memory,
        "frozen": frozen,
    }
    for found in (round_trip(tree, tmp_path / "c"), jct.load(tmp_path / "c", tree)):
        assert_same(found, tree)
        assert all(type(leaf) is np.ndarray and leaf.flags.writeable for leaf in found.values())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_typed_keys_of_every_implementation(impl: str, tmp_path: Path) -> None:
    tree = {
        "one": jax.random.key(1, impl=impl),
        "many": jax.random.split(jax.random.key(2, impl=impl), (2, 3)),
        "none": jax.random.split(jax.random.key(2, impl=impl), 3)[:0],
        "old": jax.random.PRNGKey(3),
    }
    host = {**tree, "old": np.asarray(tree["old"])}
    assert_same(round_trip(tree, tmp_path / "c"), host)
    assert_same(jct.load(tmp_path / "c", tree), tree)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    found = jct.load(tmp_path / "c", abstract)
    assert_same(found, tree)
    assert raw(jax.random.bits(found["one"], (4,))) == raw(jax.random.bits(tree["one"], (4,)))


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="dense", metadata={"static": True})


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.children = (first, second)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.children == other.children

    __hash__ = None  # type: ignore[assignment]


jax.tree_util.register_pytree_node(Pair, lambda pair: (pair.children, "pair"), lambda _, children: Pair(*children))


def everything() -> Any:
    return {
        "none": None,
        "empty": [{}, [], (), None, ((),), {"a": {}}],
        "point": Point(jnp.arange(3), Point(1, None)),
        "weights": Weights(jnp.ones((2, 2), jnp.bfloat16), None, name="other"),
        "ordered": collections.OrderedDict([("z", jnp.zeros(2)), ("a", 1)]),
        "counted": collections.defaultdict(int, {"b": 2, "a": np.int8(3)}),
        "pair": Pair(np.arange(2), {"deep": (1, [2.5])}),
        "python": [
            True,
            False,
            0,
            -1,
            2**100,
            0.1,
            -0.0,
            float("inf"),
            float("nan"),
            1 - 2j,
            "",
            "Grüße\0",
            b"",
            b"\xff",
        ],
        "weak": jnp.asarray(2.0),
        "strong": jnp.float32(2.0),
    }


def test_tree_of_everything_comes_back_into_target(tmp_path: Path) -> None:
    tree = everything()
    assert_same(round_trip(tree, tmp_path / "c", tree), tree)


def test_a_target_with_other_values_changes_nothing(tmp_path: Path) -> None:
    saved = {"w": jnp.arange(4.0), "n": 3, "f": 0.1, "s": "saved", "b": True, "p": Point(np.int64(1), None), "e": ()}
    other = {"w": jnp.zeros(4), "n": 0, "f": 0.0, "s": "", "b": False, "p": Point(np.int64(0), None), "e": ()}
    assert_same(round_trip(saved, tmp_path / "c", other), saved)
    assert other["w"].tolist() == [0, 0, 0, 0]


def test_target_may_have_another_container_type(tmp_path: Path) -> None:
    found = round_trip({"x": jnp.arange(2), "y": [1, 2]}, tmp_path / "c", Point(jnp.zeros(2, jnp.int32), (0, 0)))
    assert found.x.tolist() == [0, 1]
    assert found.y == (1, 2)


dtypes = st.sampled_from(
    [DTYPES[name] for name in ("bool", "int8", "uint16", "int32", "float32", "bfloat16", "float64")]
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype, shape, on_device = draw(dtypes), draw(shapes), draw(st.booleans())
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    limit = 1 if dtype.kind == "b" else 255
    data = draw(st.lists(st.integers(0, limit), min_size=size, max_size=size))
    array = np.array(data, np.uint8).view(dtype).reshape(shape)
    return jnp.asarray(array) if on_device and dtype != np.float64 else array


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
leaf_values = st.one_of(
    arrays(), arrays(), st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=4)
)
trees = st.recursive(
    leaf_values,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(st.integers(-3, 12), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Weights, inner, inner),
    ),
    max_leaves=10,
)


@given(trees)
@hypothesis_settings(max_examples=60)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "c"
    assert_same(round_trip(tree, path, tree), tree)
    untyped = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)
    assert_same(jct.load(path), untyped, structure=False)
    assert jct.verify(path).ok


@pytest.mark.parametrize("like", [None, {"k": jax.random.key(0)}], ids=["no target", "target"])
def test_key_of_unknown_implementation_is_refused(like: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "c", {"k": jax.random.key(1)})

    def refuse(*_: Any, **more: Any) -> None:
        raise ValueError(f"unrecognized PRNG implementation {more['impl']}")

    monkeypatch.setattr(jax.random, "wrap_key_data", refuse)
    with pytest.raises(jct.MismatchError, match=r"leaf 'k': .*'threefry2x32', .*unrecognized PRNG"):
        jct.load(tmp_path / "c", like)
