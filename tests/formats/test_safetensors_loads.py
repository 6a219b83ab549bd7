"""Safetensors files of any origin: one, several with an index, behind links; equal to what the library reads."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import jaxckpt_train as jct
from tests.cli.commands import run
from tests.formats.states import mesh
from tests.tree.same_trees import raw

RANDOM = np.random.default_rng(0)
TENSORS: dict[str, np.ndarray] = {
    "model.layers.0.self_attn.q_proj.weight": RANDOM.normal(size=(24, 16)).astype(np.float32),
    "model.layers.1.self_attn.q_proj.weight": RANDOM.normal(size=(24, 16)).astype(np.float32),
    "model.embed_tokens.weight": RANDOM.normal(size=(101, 16)).astype(jnp.bfloat16),
    "odd": np.arange(7, dtype=np.uint8),
    "mask": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float16),
    "empty": np.zeros((0, 3), np.float32),
    "with/slash": np.arange(3, dtype=np.int64),
}


def model(folder: Path, metadata: dict[str, str] | None = None) -> Path:
    """A model as Hugging Face lays it out: two files, and an index that says which tensor is in which."""
    names = list(TENSORS)
    weight_map = {}
    for number, some in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in some}, folder / file, metadata)
        weight_map |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_all(found: dict[str, Any]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape, raw(found[name])) == (tensor.dtype, tensor.shape, raw(tensor))


def test_a_file_loads_as_the_library_loads_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", {"format": "pt"})
    assert_all(jct.load(tmp_path / "a.safetensors"))
    assert_all(load_file(tmp_path / "a.safetensors"))
    assert jct.metadata(tmp_path / "a.safetensors").custom_metadata == {"format": "pt"}


def test_a_folder_loads_by_its_index_or_without_one(tmp_path: Path) -> None:
    assert_all(jct.load(model(tmp_path)))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_all(jct.load(tmp_path))


def test_links_are_followed_as_in_a_cache_of_models(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        os.rename(file, tmp_path / "blobs" / f"{number:064x}")
        os.symlink(f"../../blobs/{number:064x}", snapshot / file.name)
    assert_all(jct.load(snapshot))


def test_the_index_chooses_where_files_hold_more(tmp_path: Path) -> None:
    model(tmp_path)
    save_file({"odd": np.zeros(7, np.uint8), "extra": np.ones(2)}, tmp_path / "other.safetensors")
    assert_all(jct.load(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match="tensor 'odd' is in another file of the folder, too"):
        jct.load(tmp_path)


def test_tensors_go_straight_into_a_tree_and_its_shardings(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh(), PartitionSpec("tensor", None, "fsdp"))
    like = {"layers": {"q": jax.ShapeDtypeStruct((2, 16, 24), jnp.float32, sharding=sharding)}}
    operations = [
        {"op": "stack", "leaves": "model.layers.{}.self_attn.q_proj.weight", "to": "layers/q"},
        {"op": "transpose", "leaves": "layers/q", "axes": [0, 2, 1]},
    ]
    found = jct.load(model(tmp_path), like, only="layers/**", surgery=operations)["layers"]["q"]
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert found.sharding == sharding
    assert raw(found) == raw(np.stack([TENSORS[name].T for name in names]))
    renamed = jct.load(tmp_path, {"embed": jnp.zeros((101, 16), jnp.bfloat16)}, only="embed",
                       rename={"model.embed_tokens.weight": "embed"})  # fmt: skip
    assert raw(renamed["embed"]) == raw(TENSORS["model.embed_tokens.weight"])


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", jct.CorruptCheckpointError, "expected a safetensors file, found 0 bytes"),
        (b"\xff" * 8, jct.CorruptCheckpointError, "found a head of 18,446,744,073,709,551,615 bytes in a file of 8"),
        (header(b"not json"), jct.CorruptCheckpointError, "expected a safetensors file, but its head"),
        (header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)), jct.CorruptCheckpointError,
         "4 bytes do not fit"),
        (header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(9)), jct.CorruptCheckpointError,
         "but its head says"),
        (header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)), jct.CorruptCheckpointError,
         "begins at byte 4 of the data, expected 0"),
        (header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4)), jct.CorruptCheckpointError,
         "impossible shape"),
        (header(b'{"a":{"dtype":"F32","shape":[0,1180591620717411303424],"data_offsets":[0,0]}}'),
         jct.CorruptCheckpointError, r"tensor 'a': impossible shape \[0, 1180591620717411303424\]"),
        (header(b'{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'),
         jct.CorruptCheckpointError, "tensor 'a': impossible shape"),
        (header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
         jct.CorruptCheckpointError, "'a' stands twice in its head"),
        (header(b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
         jct.CorruptCheckpointError, "'dtype' stands twice in its head"),
        (header(b'{"__metadata__":{"k":"1"},"__metadata__":{"k":"1"}}'), jct.CorruptCheckpointError,
         "'__metadata__' stands twice in its head"),
        (header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', bytes(1)), jct.FormatVersionError,
         "tensor 'a' of dtype 'F4', which is not known here"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_or_damaged_is_told(
    tmp_path: Path, content: bytes, error: type[Exception], message: str
) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(error, match=message):
        jct.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight_map": {"odd": "../other.safetensors"}},
            "names '../other.safetensors', expected files of this folder",
        ),
        ({"weight_map": {"gone": "model-00001-of-00002.safetensors"}}, "lacks tensor 'gone', which the index says"),
        ({"weights": {}}, "expected an index of tensors, but"),
    ],
)
def test_an_index_that_is_wrong_is_told(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (model(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(change))
    with pytest.raises(jct.CorruptCheckpointError, match=message):
        jct.load(tmp_path)


def test_a_file_that_an_index_names_may_be_missing(tmp_path: Path) -> None:
    (model(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"00002-of-00002\.safetensors: is not there, but the index"):
        jct.load(tmp_path)
    assert run("import", tmp_path, tmp_path / "out").exit_code == 1
    assert not (tmp_path / "out").exists()


def test_files_that_count_themselves_are_all_there_without_an_index_too(tmp_path: Path) -> None:
    (model(tmp_path) / "model.safetensors.index.json").unlink()
    assert_all(jct.load(tmp_path))
    first, second = sorted(tmp_path.iterdir())
    for one in (first, second):
        with pytest.raises(
            jct.NotACheckpointError, match="one of several files of a model; pass the folder that holds"
        ):
            jct.load(one)
    second.unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"00002-of-00002\.safetensors: is not there, by the names"):
        jct.load(tmp_path)
    first.rename(tmp_path / "model-00001-of-00001.safetensors")
    assert list(jct.load(tmp_path)) == list(TENSORS)[:3]
    assert list(jct.load(tmp_path / "model-00001-of-00001.safetensors")) == list(TENSORS)[:3]


def test_a_head_may_be_written_with_more_than_it_needs(tmp_path: Path) -> None:
    head = {
        "__metadata__": {"k": "\u00e9"},
        "\u00e9/\t": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8], "x": 1},
    }
    text = json.dumps(head, indent=1).encode() + b"  \n"
    (tmp_path / "a.safetensors").write_bytes(header(text, np.array([1, 2], np.int32).tobytes()))
    assert jct.load(tmp_path / "a.safetensors")["\u00e9/\t"].tolist() == [1, 2]
