"""Differences between checkpoint and target: all of them in one error, before any data is read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.placing import weakly_typed
from jaxckpt_train.pytree.target import SHOWN_DIFFERENCES, can_cast, exact_array, rename_map
from tests.support.same_trees import assert_same

S = jax.ShapeDtypeStruct
F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16


def saved_without_data(path: Path, tree: Any) -> Path:
    """A checkpoint without segments: opening one raises CorruptCheckpointError."""
    jct.save(path, tree, settings=jct.StoreSettings(durability="none"))
    for segment in path.rglob("*.safetensors"):
        segment.unlink()
    return path


def loaded(path: Path, tree: Any, like: Any, **options: Any) -> Any:
    jct.save(path, tree, settings=jct.StoreSettings(durability="none"))
    return jct.load(path, like, **options)


def test_the_data_is_opened_only_after_the_comparison(tmp_path: Path) -> None:
    path = saved_without_data(tmp_path / "c", {"w": jnp.ones(3)})
    with pytest.raises(jct.CorruptCheckpointError, match="p00000-s000"):
        jct.load(path, {"w": S((3,), F32)})


def test_one_error_lists_every_difference_before_reading(tmp_path: Path) -> None:
    saved = {
        "depth": {"inner": jnp.ones(2)},
        "shape": jnp.ones((2, 3)),
        "dtype": jnp.ones(2, F32),
        "extra": jnp.ones(4, jnp.bfloat16),
        "nothing": None,
        "something": jnp.ones(1),
        "impl": jax.random.key(0, impl="rbg"),
        "key": jax.random.key(0),
        "raw": jax.random.PRNGKey(0),
        "text": "a",
        "inexact": 0.1,
        "huge": 2**70,
        "empty": {},
        "fine": jnp.ones(7),
    }
    target = {
        "depth": jnp.ones(2),
        "shape": S((3, 2), F32),
        "dtype": S((2,), I32),
        "missing": S((5,), F32),
        "nothing": jnp.ones(2),
        "something": None,
        "impl": jax.random.key(0, impl="unsafe_rbg"),
        "key": S((2,), jnp.uint32),
        "raw": jax.random.key(0),
        "text": 5,
        "inexact": S((), F32),
        "huge": S((), I32),
        "empty": [1],
        "fine": S((7,), F32),
    }
    path = saved_without_data(tmp_path / "c", saved)
    with pytest.raises(jct.MismatchError, match="differ in 16 leaves") as caught:
        jct.load(path, target)
    assert set(caught.value.differences) == {
        "leaf 'depth': not in the checkpoint, wanted float32[2]",
        "leaf 'depth/inner': saved float32[2], not in the target",
        "leaf 'shape': saved float32[2,3], wanted float32[3,2]",
        "leaf 'dtype': saved float32[2], wanted int32[2]; the conversion would lose data",
        "leaf 'missing': not in the checkpoint, wanted float32[5]",
        "leaf 'extra': saved bfloat16[4], not in the target",
        "leaf 'nothing': saved None, wanted float32[2]",
        "leaf 'something': saved float32[1], wanted None",
        "leaf 'impl': saved key<rbg>[], wanted key<unsafe_rbg>[]",
        "leaf 'key': saved key<threefry2x32>[], wanted uint32[2]",
        "leaf 'raw': saved uint32[2], wanted key<threefry2x32>[]",
        "leaf 'text': saved Python str, wanted Python int",
        "leaf 'inexact': saved Python float 0.1, wanted float32[], which does not hold it exactly",
        "leaf 'huge': saved Python int 1180591620717411303424, wanted int32[], which does not hold it exactly",
        "leaf 'empty': saved an empty container, not in the target",
        "leaf 'empty/0': not in the checkpoint, wanted Python int",
    }
    assert all(line in str(caught.value) for line in caught.value.differences)
    assert str(path) in str(caught.value)


def test_thousands_of_differences_stay_readable(tmp_path: Path) -> None:
    path = saved_without_data(tmp_path / "c", {str(n): n for n in range(1000)})
    with pytest.raises(jct.MismatchError, match=r"differ in 1000 leaves(.|\n)*and 950 more") as caught:
        jct.load(path, {str(n): "" for n in range(1000)})
    assert len(caught.value.differences) == 1000
    assert str(caught.value).count("\n") == SHOWN_DIFFERENCES + 2, "and what to do about it"


EXACT: list[tuple[str, Any, Any, Any]] = [
    ("an int into a 0-d array", 3, S((), I32), jnp.asarray(3)),
    ("a 0-d array into an int", jnp.int32(3), 0, jnp.int32(3)),
    ("a weak 0-d array into an int", jnp.asarray(3), 0, jnp.asarray(3)),
    ("a 0-d float array into an int", jnp.asarray(0.5), 0, jnp.asarray(0.5)),
    ("a small int into int4", 7, S((), jnp.int4), weakly_typed("x", jnp.asarray(7, jnp.int4))),
    ("an int into a numpy scalar", 3, np.int64(0), np.int64(3)),
    ("a numpy scalar into an int", np.int64(3), 0, np.int64(3)),
    ("a numpy array into a float", np.array(3, ">f4"), 0.0, np.array(3, ">f4")),
    ("an int into a numpy array", 3, np.zeros((), np.uint8), np.array(3, np.uint8)),
    ("a half into float32", 0.5, S((), F32), jnp.asarray(0.5)),
    ("a tenth into a weak float", 0.1, jnp.asarray(0.0), jnp.asarray(0.1)),
    ("a tenth into a weak int", 0.1, jnp.asarray(0), jnp.asarray(0.1)),
    ("a bool into a weak int", True, jnp.asarray(0), jnp.asarray(True)),
    ("nan into float32", float("nan"), S((), F32), jnp.asarray(float("nan"))),
    ("inf into bfloat16", float("-inf"), S((), BF16), weakly_typed("x", jnp.asarray(-jnp.inf, BF16))),
    ("minus zero into float16", -0.0, S((), jnp.float16), weakly_typed("x", jnp.float16(-0.0))),
    ("bfloat16 into a float", jnp.asarray(1.5, BF16), 0.0, jnp.asarray(1.5, BF16)),
    ("a bool into a 0-d array", True, S((), bool), jnp.asarray(True)),
    ("a 0-d array into a bool", jnp.asarray(True), False, jnp.asarray(True)),
    ("a complex into complex64", 1.5 - 2j, S((), jnp.complex64), jnp.asarray(1.5 - 2j)),
    ("a complex64 into a complex", jnp.complex64(2j), 0j, jnp.complex64(2j)),
    ("a numpy scalar into a 0-d array", np.float32(1.5), np.zeros((), np.float32), np.array(1.5, np.float32)),
]


@pytest.mark.parametrize(("saved", "like", "expected"), [c[1:] for c in EXACT], ids=[c[0] for c in EXACT])
def test_numbers_and_0_d_arrays_fit_without_loss(saved: Any, like: Any, expected: Any, tmp_path: Path) -> None:
    assert_same(loaded(tmp_path / "c", {"x": saved}, {"x": like}), {"x": expected})


REFUSED: list[tuple[Any, Any, str]] = [
    (0.1, S((), F32), "float 0.1, wanted float32.., which does not hold it exactly"),
    (1e300, S((), jnp.float16), "float 1e.300, wanted float16.., which does not hold it exactly"),
    (300, np.zeros((), np.uint8), "int 300, wanted uint8.., which does not hold it exactly"),
    (-1, np.uint32(0), "int -1, wanted uint32.., which does not hold it exactly"),
    (8, S((), jnp.int4), "int 8, wanted int4.., which does not hold it exactly"),
    (10**5000, S((), I32), "int an object of int that cannot be shown, wanted int32.., which does not hold it exactly"),
    (2**70, S((), F32), "saved Python int, wanted float32"),
    (3, S((), F32), "saved Python int, wanted float32"),
    (3.0, S((), I32), "saved Python float, wanted int32"),
    (3, S((1,), I32), r"saved Python int, wanted int32\[1\]"),
    (True, 1, "saved Python bool, wanted Python int"),
    (1, True, "saved Python int, wanted Python bool"),
    (1, 1.0, "saved Python int, wanted Python float"),
    ("1", b"1", "saved Python str, wanted Python bytes"),
    ("text", S((), F32), "saved Python str, wanted float32"),
    (10**300, jnp.asarray(0.0), "which does not hold it exactly"),
    (1e300, jnp.asarray(0.0), "float 1e.300, wanted float32.., which does not hold it exactly"),
    (jnp.float32(3), "0", "saved float32.., wanted Python str"),
    (jnp.arange(1), 0, r"saved int32\[1\], wanted Python int"),
    (jnp.int32(1), True, "saved int32.., wanted Python bool"),
    (None, 0, "saved None, wanted Python int"),
    ((), None, "saved an empty container, wanted None"),
    (np.float64(1), S((), "float64"), "JAX holds 64-bit types only with .*jax_enable_x64"),
    (np.arange(2), S((2,), "int64"), "JAX holds 64-bit types only with .*jax_enable_x64"),
    (np.zeros(2, complex), S((2,), "complex128"), "JAX holds 64-bit types only with .*jax_enable_x64"),
    (jnp.ones(2), S((2,), jnp.bfloat16), "wanted bfloat16.2.; load.*cast=True. converts it"),
    (jnp.arange(2), S((2,), F32), "wanted float32.2.; load.*cast=True. converts it"),
    (jnp.ones(2), S((2,), I32), "wanted int32.2.; the conversion would lose data"),
    (jax.random.key(0), jax.random.split(jax.random.key(0), 2), r"saved key<threefry2x32>\[\], wanted .*\[2\]"),
    (jax.random.split(jax.random.key(0), 2), jax.random.key(0), r"\[2\], wanted key<threefry2x32>\[\]"),
    (jax.random.key(0), np.zeros(2, np.uint32), "saved key<threefry2x32>.., wanted uint32"),
]


@pytest.mark.parametrize(("saved", "like", "reason"), REFUSED, ids=[case[2] for case in REFUSED])
def test_lossy_or_unlike_targets_are_refused(saved: Any, like: Any, reason: str, tmp_path: Path) -> None:
    path = saved_without_data(tmp_path / "c", {"x": saved})
    with pytest.raises(jct.MismatchError, match=f"leaf 'x': .*{reason}"):
        jct.load(path, {"x": like})


CAST: list[tuple[Any, Any, Any]] = [
    (jnp.asarray([1.5, 2.0]), S((2,), jnp.bfloat16), jnp.asarray([1.5, 2.0], jnp.bfloat16)),
    (jnp.asarray([1e-30, jnp.inf]), S((2,), jnp.float16), jnp.asarray([0, jnp.inf], jnp.float16)),
    (jnp.asarray([0.1, 65519]), S((2,), jnp.float16), jnp.asarray([0.1, 65504], jnp.float16)),
    (jnp.arange(3), S((3,), F32), jnp.arange(3.0)),
    (jnp.asarray([True, False]), S((2,), I32), jnp.asarray([1, 0])),
    (np.arange(3), S((3,), I32), jnp.arange(3)),
    (np.arange(3), np.zeros(3, ">u2"), np.arange(3).astype(">u2")),
    (jnp.ones(2, jnp.complex64), np.zeros(2, np.complex128), np.ones(2, np.complex128)),
    (3, S((), F32), jnp.float32(3)),
    (True, S((), I32), jnp.int32(1)),
]


@pytest.mark.parametrize(("saved", "like", "expected"), CAST, ids=[str(case[1]) for case in CAST])
def test_cast_converts_within_sort_of_number_and_upwards(saved: Any, like: Any, expected: Any, tmp_path: Path) -> None:
    assert_same(loaded(tmp_path / "c", {"x": saved}, {"x": like}, cast=True), {"x": expected})


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (jnp.ones(2), S((2,), I32)),
        (jnp.ones(2), np.zeros(2, bool)),
        (jnp.arange(2), S((2,), bool)),
        (jnp.ones(2, jnp.complex64), S((2,), F32)),
        (1.0, S((), I32)),
        (2, S((), bool)),
    ],
)
def test_cast_never_goes_down(saved: Any, like: Any, tmp_path: Path) -> None:
    path = saved_without_data(tmp_path / "c", {"x": saved})
    with pytest.raises(jct.MismatchError, match="leaf 'x'"):
        jct.load(path, {"x": like}, cast=True)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([300], np.uint8),
        ([-1], np.uint8),
        ([-1], np.uint16),
        ([-1], np.uint32),
        ([-129], np.int8),
        ([128], np.int8),
        ([8], jnp.int4),
        ([2**31], np.int32),
    ],
)
def test_cast_of_integers_keeps_every_value_or_fails(values: list[int], dtype: Any, tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"x": np.array([0, 1, *values]), "y": np.array(values, np.int64).astype(np.int32)})
    with pytest.raises(jct.MismatchError, match=r"leaf 'x': cast=True.* int64"):
        jct.load(tmp_path / "c", {"x": np.zeros(3, dtype), "y": ...}, cast=True)
    if dtype is np.uint32:
        with pytest.raises(jct.MismatchError, match=r"leaf 'y': .*uint32 .* int32"):
            jct.load(tmp_path / "c", {"x": ..., "y": np.zeros(1, np.uint32)}, cast=True)


F8, F4 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
LOST: list[tuple[Any, Any]] = [
    (np.array([0, 2049]), np.float16),
    (np.array([257], np.int32), BF16),
    (np.array([2**24 + 1]), np.float32),
    (np.array([-(2**53) - 1]), np.float64),
    (np.array([2**63 - 1]), np.float64),
    (np.array([2**64 - 1], np.uint64), np.float32),
    (np.array([2**24 + 1]), np.complex64),
    (np.array([200], np.uint8), np.int8),
    (np.array([1, 1e30], np.float32), np.float16),
    (np.array([-3.4e38, np.nan], np.float32), BF16),
    (np.array([1e39]), np.float32),
    (np.array([1e39j]), np.complex64),
    (np.array([500], np.float32), F8),
    (np.array([100], np.float32), F4),
]


@pytest.mark.parametrize(("saved", "dtype"), LOST, ids=[f"{c[0]} {np.dtype(c[1])}" for c in LOST])
@pytest.mark.parametrize("before", [0, 1 << 18], ids=["first", "later"])
def test_cast_refuses_values_that_do_not_survive(saved: np.ndarray, dtype: Any, before: int, tmp_path: Path) -> None:
    array = np.concatenate([np.full(before, saved.dtype.type(0)), saved])
    jct.save(tmp_path / "c", {"x": array}, settings=jct.StoreSettings(durability="none"))
    with pytest.raises(jct.MismatchError, match="leaf 'x': cast=True"):
        jct.load(tmp_path / "c", {"x": np.zeros(array.shape, dtype)}, cast=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16, np.complex64, F8], ids=str)
@pytest.mark.parametrize("saved", [np.int8, np.int32, np.int64, np.uint64], ids=str)
def test_cast_keeps_large_integers_that_a_float_holds(saved: Any, dtype: Any, tmp_path: Path) -> None:
    limits, most = np.iinfo(saved), float(jnp.finfo(dtype).max)
    powers = [2**at for at in range(65) if 2**at <= min(limits.max, most)]
    values = np.array([*powers, *(-power for power in powers if limits.min < 0)], saved)
    jct.save(tmp_path / "c", {"x": values}, settings=jct.StoreSettings(durability="none"))
    found = jct.load(tmp_path / "c", {"x": np.zeros(values.shape, dtype)}, cast=True)["x"]
    assert [int(value.real) for value in found.astype(np.complex128)] == values.tolist()


def test_casts_are_ordered() -> None:
    dtypes = [np.dtype(name) for name in ("bool", "int8", "float32", "complex64")]
    for low, saved in enumerate(dtypes):
        for high, want in enumerate(dtypes):
            assert can_cast(saved, want) == (low <= high)
    assert can_cast(np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float4_e2m1fn))


def test_exact_array_holds_the_value_or_refuses() -> None:
    assert exact_array(2**63, np.dtype("uint64")) == 2**63
    assert exact_array(2**63, np.dtype("int64")) is None
    assert exact_array(2**70, np.dtype("float32")) == 2**70
    assert exact_array(2**70, np.dtype(jnp.bfloat16)) is None  # refused, although bfloat16 holds it
    assert exact_array(complex(0, 0.1), np.dtype("complex64")) is None


def test_rename_maps_patterns_and_refuses_clashes() -> None:
    names = ["old/a", "old/b/c", "single", "rest"]
    assert rename_map(names, {"old/**": "new/x/**", "single": "one"}) == {
        "old/a": "new/x/a",
        "old/b/c": "new/x/b/c",
        "single": "one",
        "rest": "rest",
    }
    with pytest.raises(jct.MismatchError, match=r"rename: .* 'odl/.*has 'old/"):
        rename_map(names, {"odl/**": "new/**"})
    with pytest.raises(jct.MismatchError, match=r"'single' and 'rest' .* path 'rest'"):
        rename_map(names, {"single": "rest"})


def message_of(path: Path, like: Any, **options: Any) -> str:
    with pytest.raises(jct.MismatchError) as caught:
        jct.load(path, like, **options)
    return str(caught.value)


def test_escapes_in_paths_are_explained(tmp_path: Path) -> None:
    path = saved_without_data(tmp_path / "c", {"a/b": np.ones(2), "x": {"~t": 1, "7": 2}})
    with pytest.raises(jct.MismatchError, match="~ is written ~0, / is ~1") as caught:
        jct.load(path, {"a/b": np.ones(3), "x": {"~t": "", "7": ""}})
    assert "leaf 'a~1b'" in caught.value.differences[0]
    with pytest.raises(jct.MismatchError, match="~ is written ~0"):
        jct.load(path, {"a/b": np.ones(2)}, only="a/b")
    plain = message_of(saved_without_data(tmp_path / "p", {"b": 1}), {"b": ""})
    assert "in a key" not in plain


FUNCTIONS: list[Any] = [jax.nn.relu, lambda x: x, jax.jit(lambda x: x), np.sin, functools.partial(jnp.sum, axis=0)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=[str(type(each).__name__) for each in FUNCTIONS])
def test_functions_among_leaves_are_refused_with_way_out(function: Any, tmp_path: Path) -> None:
    tree = {"w": jnp.ones(2), "layer/1": [function]}
    with pytest.raises(jct.UnsupportedLeafError, match=r"leaf 'layer~11/0'.*/ is ~1.*eqx.filter"):
        jct.save(tmp_path / "c", tree)
    jct.save(tmp_path / "c", {**tree, "layer/1": [None]})
    with pytest.raises(jct.UnsupportedLeafError, match=r"leaf 'layer~11/0' of the target.*eqx.filter"):
        jct.load(tmp_path / "c", tree)
