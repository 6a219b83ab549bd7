"""Loads with transforms: the leaves of changed trees have the bytes that numpy makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.transforms.operations import (
    Add,
    Cast,
    Copy,
    Drop,
    Fuse,
    Pad,
    Rename,
    Reshape,
    Split,
    Stack,
    Transpose,
    Truncate,
    Unstack,
)
from tests.support.commands import run

RANDOM = np.random.default_rng(0)
LAYERS = [
    {
        "attn": {name: RANDOM.normal(size=(8, 12)).astype(np.float32) for name in "qkv"},
        "norm": RANDOM.normal(size=8).astype(np.float32),
    }
    for _ in range(3)
]
EMBED = RANDOM.normal(size=(10, 8)).astype(np.float32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree = {"model": {"layers": LAYERS, "embed": EMBED}, "step": 7, "key": jax.random.key(5), "empty": {}}
    jct.save(tmp_path / "a", tree)
    return tmp_path / "a"


def load(path: Path, *operations: Any, **more: Any) -> Any:
    return jct.load(path, transforms=operations, **more)


def test_leaves_get_other_paths_and_the_rest_stays(saved: Path) -> None:
    found = load(saved, Rename("model/layers/*/**", "blocks/*/**"), Drop("step"))
    assert np.array_equal(found["blocks"][2]["attn"]["k"], LAYERS[2]["attn"]["k"])
    assert set(found) == {"blocks", "model", "key", "empty"}
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(5)).tolist()


def test_copied_leaves_have_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    operations = [
        Copy("model/embed", "head/kernel"),
        Transpose("head/kernel"),
        Copy("head/kernel", "head/again"),
        Copy("model/layers/*/attn/**", "ema/*/**"),
        Copy("key", "key2"),
        Copy("step", "step2"),
    ]
    found = load(saved, *operations)
    assert np.array_equal(found["model"]["embed"], EMBED)
    assert np.array_equal(found["head"]["kernel"], EMBED.T)
    assert np.array_equal(found["head"]["again"], EMBED.T)
    assert np.array_equal(found["ema"][1]["q"], LAYERS[1]["attn"]["q"])
    assert (jax.random.key_data(found["key2"]).tolist(), found["step2"]) == (
        jax.random.key_data(jax.random.key(5)).tolist(),
        7,
    )
    words = [word for text in ("copy model/embed head", "copy step step2") for word in ("--op", text)]
    assert run("import", saved, tmp_path / "b", *words).exit_code == 0
    assert run("verify", tmp_path / "b").exit_code == 0
    assert np.array_equal(jct.load(tmp_path / "b")["head"], EMBED)
    assert (
        run("export", tmp_path / "b", tmp_path / "x.safetensors", "--to", "safetensors", "--op", "drop empty").exit_code
        == 0
    )
    assert np.array_equal(jct.load(tmp_path / "x.safetensors")["head"], EMBED)


def test_copy_goes_onto_devices_in_shards(saved: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    like = {name: jax.ShapeDtypeStruct((10, 8), jnp.float32, sharding=sharding) for name in ("embed", "head")}
    tied = [Copy("model/embed", "head"), Rename("model/embed", "embed")]
    found = load(saved, *tied, like=like, only=["embed", "head"])
    assert found["head"].sharding == sharding
    assert np.array_equal(found["head"], EMBED)
    assert np.array_equal(found["embed"], EMBED)


def test_layers_are_stacked_and_unstacked_again(saved: Path) -> None:
    stack = Stack("model/layers/{}/**", "stacked/**")
    found = load(saved, stack)["stacked"]
    assert np.array_equal(found["attn"]["q"], np.stack([layer["attn"]["q"] for layer in LAYERS]))
    assert np.array_equal(found["norm"], np.stack([layer["norm"] for layer in LAYERS]))
    last = load(saved, Stack("model/layers/{}/norm", "norms", axis=-1))["norms"]
    assert np.array_equal(last, np.stack([layer["norm"] for layer in LAYERS], -1))
    back = load(saved, stack, Unstack("stacked/**", "model/layers/{}/**"))
    assert all(np.array_equal(back["model"]["layers"][n]["attn"]["v"], LAYERS[n]["attn"]["v"]) for n in range(3))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_projections_are_fused_and_split_again(saved: Path, axis: int) -> None:
    paths = [f"model/layers/*/attn/{name}" for name in "qkv"]
    fuse = Fuse(paths, "model/layers/*/qkv", axis=axis)
    found = load(saved, fuse)["model"]["layers"]
    assert np.array_equal(found[1]["qkv"], np.concatenate([LAYERS[1]["attn"][name] for name in "qkv"], axis))
    back = load(saved, fuse, Split("model/layers/*/qkv", paths, axis=axis))["model"]["layers"]
    assert all(np.array_equal(back[0]["attn"][name], LAYERS[0]["attn"][name]) for name in "qkv")
    uneven = load(saved, Split("model/embed", ["a", "b"], sizes=[3, 7]))
    assert np.array_equal(uneven["b"], EMBED[3:])


def test_arrays_are_reformed(saved: Path) -> None:
    found = load(
        saved,
        Transpose("model/layers/*/attn/*"),
        Reshape("model/layers/*/attn/q", [3, 4, -1]),
        Cast("model/layers/**", "bfloat16"),
        Pad("model/embed", [16, None], value=1.5),
    )["model"]
    q = LAYERS[0]["attn"]["q"].T.reshape(3, 4, 8).astype(jnp.bfloat16)
    assert np.array_equal(found["layers"][0]["attn"]["q"], q)
    assert np.array_equal(found["embed"], np.concatenate([EMBED, np.full((6, 8), 1.5, np.float32)]))
    assert np.array_equal(load(saved, Truncate("model/embed", [4, None]))["model"]["embed"], EMBED[:4])


def test_added_leaves_have_a_constant_value(saved: Path) -> None:
    add = [Add("lora/b", [8, 4], "bfloat16"), Add("lora/c", [2], init="ones"), Add("lora/d", [], "int32", init=4)]
    found = load(saved, *add)["lora"]
    assert (found["b"].shape, found["b"].any()) == ((8, 4), False)
    assert (found["c"].tolist(), int(found["d"])) == ([1, 1], 4)


def test_transformed_leaves_load_into_target_on_devices(saved: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    like = {"embed": jax.ShapeDtypeStruct((8, 10), jnp.float32, sharding=sharding)}
    operations = [Rename("model/embed", "embed"), Transpose("embed")]
    found = jct.load(saved, like, transforms=operations, only="embed")
    assert found["embed"].sharding == sharding
    assert np.array_equal(found["embed"], EMBED.T)
    with pytest.raises(jct.MismatchError, match=r"leaf 'embed': .*\[8,10\].*\[8,9\]"):
        jct.load(saved, {"embed": np.zeros((8, 9), np.float32)}, transforms=operations, only="embed")


def test_damage_is_found_in_copied_and_computed_bytes(saved: Path) -> None:
    (segment,) = (saved / "state").glob("*.safetensors")
    data = bytearray(segment.read_bytes())
    at = data.find(EMBED.tobytes())
    data[at + 5] ^= 1
    segment.write_bytes(bytes(data))
    for operations in ([Rename("model/embed", "e")], [Transpose("model/embed")], [Stack("model/layers/{}/norm", "n")]):
        with pytest.raises(jct.CorruptCheckpointError, match=r"model/embed|'e'|leaf"):
            load(saved, *operations)
    assert np.array_equal(load(saved, Drop("model/embed"))["model"]["layers"][0]["norm"], LAYERS[0]["norm"])


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([Rename("model/embde", "e")], r"operation 1 of 1 \(rename\): no leaf matches 'model/embde'"),
        ([Drop("step"), Rename("key", "model/embed")], r"operation 2 of 2 \(rename\): leaf 'key' would become"),
        ([Rename("model/layers/*/norm", "model/layers/*/attn/q")], "leaf .* would become .*, which already exists"),
        ([Copy("step", "key")], "leaf 'key' already exists; drop it first"),
        ([Copy("model/layers/*/norm", "model/layers/*/attn/q")], "leaf 'model/layers/0/attn/q' already exists"),
        ([Copy("step", "step/x")], "leaf 'step/x' would be below leaf 'step'"),
        ([Copy("stpe", "x")], "no leaf matches 'stpe', did you mean"),
        ([Stack("model/layers/{}/norm", "step")], "leaf 'step' already exists"),
        ([Drop("model/layers/1/**"), Stack("model/layers/{}/**", "s/**")], r"expected layers 0 to 2, found \[0, 2\]"),
        ([Transpose("step")], "leaf 'step': expected an array, found int"),
        ([Transpose("key")], "leaf 'key': expected an array, found key<threefry2x32>"),
        ([Transpose("model/embed", [0, 1, 2])], r"axes: expected each of \[0, 1\] once, found \[0, 1, 2\]"),
        ([Stack("model/layers/{}/attn/q", "q"), Transpose("q", [0, 2])], r"each of \[0, 1, 2\] once, found \[0, 2\]"),
        ([Transpose("model/layers/0/norm", [1])], r"axes: expected each of \[0\] once, found \[1\]"),
        ([Drop("modle/*/0/nrom")], "no leaf matches 'modle/\\*/0/nrom', did you mean \"model/\\*/0/norm\"\\?$"),
        ([Stack("model/layrs/{}/**", "s/**")], 'did you mean "model/layers/{}/\\*\\*"\\?$'),
        ([Drop("completely/other")], "no leaf matches 'completely/other'; there are 'empty', 'key', "),
        ([Reshape("model/embed", [7, -1])], r"leaf 'model/embed': expected .* \[7, -1\], found \[10, 8\]"),
        (
            [Fuse(["model/embed", "model/layers/0/norm"], "x")],
            r"the same shape except on axis 0, found model/embed float32\[10,8\], model/layers/0/norm float32\[",
        ),
        ([Fuse(["model/embed", "nothing"], "x")], "leaf 'nothing', .* does not exist"),
        ([Split("model/embed", ["a", "b", "c"])], "expected sizes that add up to 10, found .3, 3, 3."),
        ([Split("model/embed", ["a", "b"], sizes=[3, 8])], r"expected sizes that add up to 10, found \[3, 8\]"),
        ([Split("model/embed", ["a", "b"], axis=2)], "expected an array with axis 2, found 2 axes"),
        ([Cast("model/embed", "int32")], "cannot be cast from float32 to int32"),
        ([Pad("model/embed", [9, 8])], r"not larger than \[9, 8\], found \[10, 8\]"),
        ([Truncate("model/embed", [11, 8])], r"not smaller than \[11, 8\]"),
        ([Add("step", [1])], "leaf 'step' already exists"),
        ([Add("step/x", [1])], r"operation 1 of 1 \(add\): leaf 'step/x' would be below leaf 'step'"),
        ([Add("empty/x", [1])], "leaf 'empty/x' would be below leaf 'empty'"),
        ([Rename("step", "key/a/b")], r"\(rename\): leaf 'key/a/b' would be below leaf 'key'"),
        ([Rename("step", "model/layers/0")], "leaf 'model/layers/0/.*' would be below leaf 'model/layers/0'"),
        ([Stack("model/layers/{}/norm", "model")], "leaf 'model/.*' would be below leaf 'model'"),
        ([Rename("step", "~")], "would be below leaf '~'"),
        ([Rename("step", "x/~fzz")], "'x/~fzz' is not a leaf path"),
        ([Rename("step", "/".join("x" * 201))], "expected at most 200 levels"),
        (
            [Add("z", [10**18])],
            r"leaf 'z': expected a valid shape of at most 16 TiB, found float32\[10+\]",
        ),
        ([Add("z", [0, 2**62])], r"leaf 'z': expected a valid shape .* found float32\[0,4611686018427387904\]"),
        ([Add("z", [1] * 65)], "expected a valid shape"),
        ([Pad("model/embed", [10**18, None])], r"\(pad\): leaf 'model/embed': .* found float32"),
        ([Reshape("model/embed", [1] * 63 + [10, 8])], "expected a valid shape"),
        ([Add("z", [0, 2**59]), Unstack("z", "z/{}", axis=1)], "leaf 'z': .* found 576,460,752,303,423,488"),
        ([Add("z", [2], "int64"), Pad("z", [3], value=float("nan"))], "'z' of int64 cannot hold the value nan"),
        (
            [Add("z", [2], "int64"), Pad("z", [3], value=1e30)],
            r"\(pad\): leaf 'z' of int64 cannot hold the value 1e\+30",
        ),
        ([Add("z", [2], "int64"), Pad("z", [3], value=1.5)], "cannot hold the value 1.5"),
        ([Add("z", [2], "uint8"), Pad("z", [3], value=-1)], "cannot hold the value -1"),
        ([Add("z", [2], "float16"), Pad("z", [3], value=1e30)], "cannot hold the value"),
        ([Add("z", [2], "int8", init=300)], r"\(add\): leaf 'z' of int8 cannot hold the value 300"),
    ],
)
def test_unfit_values_are_refused_before_reading(saved: Path, operations: list[Any], message: str) -> None:
    with pytest.raises(jct.MismatchError, match=message):
        load(saved, *operations)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rename", "transforms: expected a list of operations, found 'rename'"),
        (
            [{"op": "renam", "leaves": "a", "to": "b"}],
            r"transforms: operation 1 of 1: op: expected one of .*, did you mean \"rename\"",
        ),
        ([{"op": "rename", "leaves": "a"}], r"transforms: operation 1 of 1 \(rename\): expected to"),
        (
            [{"op": "drop", "leafs": "a"}],
            r'transforms: operation 1 of 1 \(drop\): unknown key "leafs", did you mean "leaves"',
        ),
        (
            [{"op": "drop", "leaves": 3}],
            r"transforms: operation 1 of 1 \(drop\): leaves: expected a leaf path or a pattern",
        ),
        ([{"op": "rename", "leaves": "a/*", "to": "b"}], "expected the wildcards of 'a/\\*' in 'b'"),
        (
            [{"op": "stack", "leaves": "a", "to": "b"}],
            r"\(stack\): leaves: expected {} .* found 'a'$",
        ),
        (
            [{"op": "cast", "leaves": "a", "dtype": "float33"}],
            r"\(cast\): dtype: .* found 'float33', did you mean \"float32\"",
        ),
        ([{"op": "nest"}, {"op": "stack", "leaves": "a/*/b", "to": "b"}], r"2 of 2 \(stack\): .* found 'a/\*/b'$"),
        ([{"op": "stack", "leaves": "a/{}", "to": "b/{}"}], "expected no {} in to"),
        ([{"op": "add", "leaf": "a/*", "shape": [1]}], "expected a path without wildcards"),
        ([{"op": "add", "leaf": "a", "shape": [1], "init": "normal"}], "init: expected zeros, ones or a number"),
        ([7], r"transforms: operation 1 of 1: expected an operation such as"),
    ],
)
def test_invalid_operation_is_refused_by_name(saved: Path, given: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError, match=message):
        jct.load(saved, transforms=given)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (
            np.array([3, 300, -1, 2**40]),
            "int8",
            r"'i' of int64: 300 at \[1\] does not fit int8 \(-128 to 127\)",
        ),
        (np.array([[0, 5], [-1, 300]]), "uint64", r"'i' of int64: -1 at \[1, 0\] does not fit uint64"),
        (np.array([2**63, 1], np.uint64), "int64", r"'i' of uint64: 9223372036854775808 at \[0\] does not fit int64"),
        (
            np.array([7, 8], np.int32),
            "int4",
            r"'i' of int32: 8 at \[1\] does not fit int4 \(-8 to 7\)",
        ),
    ],
)
def test_unfit_integers_are_refused_never_wrapped(tmp_path: Path, values: np.ndarray, dtype: str, message: str) -> None:
    jct.save(tmp_path / "a", {"i": values})
    with pytest.raises(jct.MismatchError, match=r"operation 1 of 1 \(cast\): leaf " + message):
        load(tmp_path / "a", Cast("i", dtype))


def test_integers_that_fit_are_cast(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"i": np.array([127, -128, 0]), "u": np.array([2**62], np.uint64)})
    found = load(tmp_path / "a", Cast("i", "int8"), Cast("u", "int64"), Pad("i", [4], value=-128))
    assert (found["i"].dtype, found["i"].tolist()) == (np.int8, [127, -128, 0, -128])
    assert (found["u"].dtype, found["u"].tolist()) == (np.int64, [2**62])


def test_large_constants_are_made_in_pieces(saved: Path) -> None:
    small = [{"op": "add", "leaf": "z", "shape": [2**40], "init": 1}, {"op": "truncate", "leaves": "z", "shape": [3]}]
    assert jct.load(saved, transforms=small)["z"].tolist() == [1, 1, 1]


def test_operations_may_be_plain_dicts(saved: Path) -> None:
    given = [
        {"op": "stack", "leaves": "model/layers/{}/attn/*", "to": "attn/*"},
        {"op": "fuse", "leaves": ["attn/q", "attn/k", "attn/v"], "to": "attn/qkv", "axis": 2},
        {"op": "transpose", "leaves": "attn/qkv", "axes": [2, 0, 1]},
    ]
    found = jct.load(saved, transforms=given, only="attn/**")["attn"]["qkv"]
    expected = np.concatenate([np.stack([layer["attn"][name] for layer in LAYERS]) for name in "qkv"], 2)
    assert np.array_equal(found, expected.transpose(2, 0, 1))
