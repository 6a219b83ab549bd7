"""Safetensors files of any origin: single, with an index, or behind links; tensors equal those of the library."""

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
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import jaxckpt_train as jct
from tests.support.commands import run
from tests.support.model_states import mesh
from tests.support.same_trees import raw

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
    """Write a model in the layout of Hugging Face: two files, and an index of the file of each tensor."""
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


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def test_a_file_loads_as_the_library_loads_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", {"format": "pt"})
    assert_all(jct.load(tmp_path / "a.safetensors"))
    assert_all(load_file(tmp_path / "a.safetensors"))
    assert jct.metadata(tmp_path / "a.safetensors").custom_metadata == {"format": "pt"}


def test_folder_loads_by_its_index_or_without_one(tmp_path: Path) -> None:
    assert_all(jct.load(model(tmp_path)))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_all(jct.load(tmp_path))


def test_links_are_followed_as_in_cache_of_models(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    model(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        os.rename(file, tmp_path / "blobs" / f"{number:064x}")
        os.symlink(f"../../blobs/{number:064x}", snapshot / file.name)
    assert_all(jct.load(snapshot))


def test_index_path_loads_only_what_it_names(tmp_path: Path) -> None:
    model(tmp_path)
    save_file({"odd": np.zeros(7, np.uint8), "extra": np.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(jct.NotACheckpointError, match=r"found also other\.safetensors"):
        jct.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    assert_all(jct.load(index))
    run("import", index, tmp_path / "out")
    assert_all(jct.load(tmp_path / "out"))
    assert run("show", tmp_path).exit_code == 3
    assert sorted(jct.load(tmp_path / "other.safetensors")) == ["extra", "odd"]


SERIES = {
    "model-0000{}-of-00002.safetensors": "model.safetensors.index.json",
    "model.fp16-0000{}-of-00002.safetensors": "model.safetensors.index.fp16.json",
    "pytorch_model.fp16-0000{}-of-00002.safetensors": "pytorch_model.fp16.safetensors.index.json",
    "diffusion_pytorch_model-0000{}-of-00002.fp16.safetensors": "diffusion_pytorch_model.safetensors.fp16.index.json",
    "unet.non_ema-0000{}-of-00002.safetensors": "unet.safetensors.index.non_ema.json",
    "model-0000{}-of-000002.safetensors": "model.safetensors.index.json",
    "model.safetensors-0000{}-of-00002.safetensors": "model.safetensors.index.json",
    "model_0000{}-of-00002.safetensors": "model.safetensors.index.json",
    "model-{}-of-2.safetensors": "model.safetensors.index.json",
    "0000{}-of-00002.safetensors": "model.safetensors.index.json",
}
HALVES: list[dict[str, np.ndarray]] = [{"a": np.arange(3.0), "b": np.arange(2)}, {"c": np.ones((2, 2), np.float16)}]


def series(folder: Path, names: str) -> list[Path]:
    """Write two files of one numbered series."""
    paths = [folder / names.format(number) for number in (1, 2)]
    for path, half in zip(paths, HALVES, strict=True):
        save_file(half, path)
    return paths


def write_index(path: Path, files: list[Path], halves: list[dict[str, Any]]) -> Path:
    path.write_text(
        json.dumps({"weight_map": {k: f.name for f, half in zip(files, halves, strict=True) for k in half}})
    )
    return path


@pytest.mark.parametrize("names", SERIES)
@pytest.mark.parametrize("has_index", [True, False])
def test_numbered_files_load_whole_or_name_missing_one(tmp_path: Path, names: str, has_index: bool) -> None:
    paths = series(tmp_path, names)
    if has_index:
        write_index(tmp_path / SERIES[names], paths, HALVES)
    assert sorted(jct.load(tmp_path)) == ["a", "b", "c"]
    for path in paths:
        with pytest.raises(jct.NotACheckpointError, match=f"pass the folder .* {tmp_path}$"):
            jct.load(path)
    for path in paths:
        path.rename(tmp_path / "away")
        with pytest.raises(jct.CorruptCheckpointError) as raised:
            jct.load(tmp_path)
        assert path.name in str(raised.value)
        (tmp_path / "away").rename(path)


def test_series_counted_from_zero_is_complete(tmp_path: Path) -> None:
    first, second = series(tmp_path, "model-0000{}-of-00002.safetensors")
    first.rename(tmp_path / "model-00000-of-00002.safetensors")
    with pytest.raises(jct.CorruptCheckpointError, match="model-00001-of-00002"):
        jct.load(tmp_path)
    second.rename(first)
    assert sorted(jct.load(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["step_100_of_1000", "part-of-3", "w-3-of-0", "w-1-of-99999999", "v1.0-fp16"])
def test_names_without_valid_count_are_single_files(tmp_path: Path, name: str) -> None:
    save_file(HALVES[0], tmp_path / f"{name}.safetensors")
    assert sorted(jct.load(tmp_path / f"{name}.safetensors")) == ["a", "b"]
    assert sorted(jct.load(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("other", SERIES.values())
def test_two_indexes_in_a_folder_are_ambiguous(tmp_path: Path, other: str) -> None:
    paths = series(tmp_path, "model-0000{}-of-00002.safetensors")
    one = write_index(tmp_path / "zz.safetensors.index.json", paths, HALVES)
    two = write_index(tmp_path / other, paths[:1], HALVES[:1])
    with pytest.raises(jct.NotACheckpointError) as raised:
        jct.load(tmp_path)
    assert one.name in str(raised.value)
    assert other in str(raised.value)
    assert sorted(jct.load(one)) == ["a", "b", "c"]
    assert sorted(jct.load(two)) == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        "optimizer.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "model-00001-of-00003.safetensors",
    ],
)
@pytest.mark.parametrize("form", ["file", "series", "index"])
def test_models_in_one_folder_are_not_merged(tmp_path: Path, other: str, form: str) -> None:
    if form == "file":
        save_file(HALVES[0], tmp_path / "model.safetensors")
    else:
        paths = series(tmp_path, "model-0000{}-of-00002.safetensors")
        if form == "index":
            write_index(tmp_path / "model.safetensors.index.json", paths, HALVES)
    save_file({"z": np.ones(1)}, tmp_path / other)
    with pytest.raises(jct.NotACheckpointError) as raised:
        jct.load(tmp_path)
    assert other in str(raised.value)
    assert "pass the path" in str(raised.value)


def test_index_and_file_of_one_name_are_ambiguous(tmp_path: Path) -> None:
    paths = series(tmp_path, "model-0000{}-of-00002.safetensors")
    save_file(HALVES[0] | HALVES[1], tmp_path / "model.safetensors")
    index = write_index(tmp_path / "model.safetensors.index.json", paths, HALVES)
    with pytest.raises(jct.NotACheckpointError, match=r"found also model\.safetensors"):
        jct.load(tmp_path)
    for path in paths:
        path.unlink()
    write_index(index, [tmp_path / "model.safetensors"], [HALVES[0] | HALVES[1]])
    assert sorted(jct.load(tmp_path)) == ["a", "b", "c"]


def test_index_must_name_all_tensors_of_its_files(tmp_path: Path) -> None:
    paths = series(tmp_path, "model-0000{}-of-00002.safetensors")
    index = write_index(tmp_path / "model.safetensors.index.json", paths, [{"a": 1}, HALVES[1]])
    with pytest.raises(jct.CorruptCheckpointError, match=r"00001-of-00002.safetensors: .* tensor 'b'"):
        jct.load(tmp_path)
    assert sorted(jct.load(index)) == ["a", "c"]
    write_index(index, paths[:1], HALVES[:1])
    paths[1].unlink()
    with pytest.raises(jct.CorruptCheckpointError, match="00002-of-00002"):
        jct.load(tmp_path)
    index.write_text('{"weight_map": {}}')
    paths[0].unlink()
    with pytest.raises(jct.CorruptCheckpointError, match="expected an index of tensors"):
        jct.load(tmp_path)


def test_parts_of_tensors_of_torch_processes_are_refused(tmp_path: Path) -> None:
    about = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0]}}), "DCP_VERSION": "1.0", "format": "pt"}
    for rank in (1, 2):
        save_file({"a": np.arange(3.0)}, tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", about)
    with pytest.raises(jct.NotACheckpointError, match="2 models"):
        jct.load(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(jct.UnsupportedLeafError, match="consolidate_safetensors_files"):
            jct.load(path)


@pytest.mark.parametrize("value", [3, 0.5, True])
def test_python_numbers_of_targets_are_filled(tmp_path: Path, value: Any) -> None:
    save_file({"n": np.asarray(value)}, tmp_path / "m.safetensors")
    run("import", tmp_path / "m.safetensors", tmp_path / "b")
    for path in (tmp_path / "m.safetensors", tmp_path / "b"):
        found = jct.load(path, {"n": type(value)()})["n"]
        assert (type(found), found) == (type(value), value)


def test_directories_named_like_files_are_ignored(tmp_path: Path) -> None:
    save_file(HALVES[0], tmp_path / "model.safetensors")
    (tmp_path / "old.safetensors").mkdir()
    (tmp_path / "old.safetensors.index.json").mkdir()
    assert sorted(jct.load(tmp_path)) == ["a", "b"]
    save_file(HALVES[1], tmp_path / "old.safetensors" / "model.safetensors")
    assert sorted(jct.load(tmp_path / "old.safetensors")) == ["c"]


ONE = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "text",
    [
        b'{"__metadata__":null,' + ONE + b"}",
        b'{"__metadata__": null ,' + ONE + b"}",
        b"{" + ONE + b',"__metadata__":null}   ',
        b'{"__metadata__":{},' + ONE + b"}",
        b"  {" + ONE + b"}",
        b'{"a":{"dtype":"F32","x":[null],"shape":[1],"data_offsets":[0,4]}}',
        b'{"b":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},' + ONE + b"}",
        b'{"b":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]},' + ONE + b"}",
    ],
)
def test_headers_that_the_library_accepts_are_loaded(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(header(text, np.float32(5).tobytes()))
    theirs, found = load_file(tmp_path / "a.safetensors"), jct.load(tmp_path / "a.safetensors")
    assert found.keys() == theirs.keys()
    assert [raw(found[name]) for name in theirs] == [raw(theirs[name]) for name in theirs]
    assert not jct.metadata(tmp_path / "a.safetensors").custom_metadata


@pytest.mark.parametrize(
    "text",
    [
        b'{"__metadata__":{"k":1},' + ONE + b"}",
        b'{"__metadata__":{"k":null},' + ONE + b"}",
        b'{"__metadata__":[],' + ONE + b"}",
        b'{"__metadata__":null,"__metadata__":null,' + ONE + b"}",
        b"{" + ONE + b"}\0",
        b'{"b":{"dtype":"F32","shape":[0],"data_offsets":[2,2]},' + ONE + b"}",
        b'{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + ONE + b"}",
        b'{"a":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"C128","shape":[],"data_offsets":[0,4]}}',
    ],
)
def test_headers_that_the_library_refuses_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(header(text, bytes(4)))
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "a.safetensors")
    with pytest.raises((jct.CorruptCheckpointError, jct.FormatVersionError)):
        jct.load(tmp_path / "a.safetensors")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (POINTER, "git lfs pull"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", "web page"),
        (b"\n \xef\xbb\xbf<HTML>"[2:] + b" " * 3000, "web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
    ],
)
@pytest.mark.parametrize("where", ["file", "folder", "index"])
def test_downloads_of_something_else_are_named(tmp_path: Path, content: bytes, found: str, where: str) -> None:
    path = tmp_path / ("model.safetensors.index.json" if where == "index" else "model.safetensors")
    path.write_bytes(content)
    with pytest.raises(jct.CorruptCheckpointError) as raised:
        jct.load(tmp_path if where == "folder" else path)
    assert found in str(raised.value)
    assert path.name in str(raised.value)


@pytest.mark.parametrize("name", ["state/p00000-s000.safetensors", "manifest.json"])
def test_pointers_in_our_own_checkpoints_are_named(tmp_path: Path, name: str) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(1000.0)})
    (tmp_path / "c" / name).write_bytes(POINTER)
    with pytest.raises(jct.CorruptCheckpointError, match="git lfs pull") as raised:
        jct.load(tmp_path / "c")
    assert name in str(raised.value)
    assert "git lfs pull" in jct.verify(tmp_path / "c").problems[0]
    (tmp_path / "c" / name).write_bytes(b"version")
    with pytest.raises(jct.CorruptCheckpointError) as raised:
        jct.load(tmp_path / "c")
    assert "lfs" not in str(raised.value)


@pytest.mark.parametrize("name", ["flax_model.msgpack", "checkpoint_3"])
def test_pointers_in_place_of_flax_files_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(jct.NotACheckpointError, match="git lfs pull"):
        jct.load(tmp_path / name)


def test_tensors_go_straight_into_tree_and_its_shardings(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh(), PartitionSpec("tensor", None, "fsdp"))
    like = {"layers": {"q": jax.ShapeDtypeStruct((2, 16, 24), jnp.float32, sharding=sharding)}}
    operations = [
        {"op": "stack", "leaves": "model.layers.{}.self_attn.q_proj.weight", "to": "layers/q"},
        {"op": "transpose", "leaves": "layers/q", "axes": [0, 2, 1]},
    ]
    found = jct.load(model(tmp_path), like, only="layers/**", transforms=operations)["layers"]["q"]
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert found.sharding == sharding
    assert raw(found) == raw(np.stack([TENSORS[name].T for name in names]))
    renamed = jct.load(tmp_path, {"embed": jnp.zeros((101, 16), jnp.bfloat16)}, only="embed",
                       rename={"model.embed_tokens.weight": "embed"})  # fmt: skip
    assert raw(renamed["embed"]) == raw(TENSORS["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", jct.CorruptCheckpointError, "expected a safetensors file of at least 8 bytes, found 0 bytes"),
        (b"\xff" * 8, jct.CorruptCheckpointError, "found a header of 18,446,744,073,709,551,615 bytes in a file of 8"),
        (header(b"not json"), jct.CorruptCheckpointError, "a.safetensors: expected a safetensors file, found"),
        (header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)), jct.CorruptCheckpointError,
         "tensor 'a': found 4 bytes"),
        (header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(9)), jct.CorruptCheckpointError,
         "expected the 66 bytes of its header, found 71"),
        (header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)), jct.CorruptCheckpointError,
         "tensor 'a' starts at byte 4 of the data, expected 0"),
        (header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4)), jct.CorruptCheckpointError,
         "impossible shape"),
        (header(b'{"a":{"dtype":"F32","shape":[0,1180591620717411303424],"data_offsets":[0,0]}}'),
         jct.CorruptCheckpointError, r"tensor 'a': impossible shape \[0, 1180591620717411303424\]"),
        (header(b'{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'),
         jct.CorruptCheckpointError, "tensor 'a': impossible shape"),
        (header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
         jct.CorruptCheckpointError, "'a' twice"),
        (header(b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
         jct.CorruptCheckpointError, "'dtype' twice"),
        (header(b'{"__metadata__":{"k":"1"},"__metadata__":{"k":"1"}}'), jct.CorruptCheckpointError,
         "'__metadata__' twice"),
        (header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', bytes(1)), jct.FormatVersionError,
         "tensor 'a' has the unsupported dtype 'F4'"),
    ],
)  # fmt: skip
def test_foreign_or_damaged_file_is_reported(
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
            "expected .* found '../other.safetensors'",
        ),
        (
            {"weight_map": {"gone": "model-00001-of-00002.safetensors"}},
            "00001-of-00002.safetensors: has no tensor 'gone'",
        ),
        ({"weights": {}}, "expected an index of tensors, found"),
    ],
)
def test_index_that_is_wrong_is_reported(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (model(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(change))
    with pytest.raises(jct.CorruptCheckpointError, match=message):
        jct.load(tmp_path)


def test_file_that_index_names_may_be_missing(tmp_path: Path) -> None:
    (model(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=r"00002-of-00002\.safetensors: "):
        jct.load(tmp_path)
    assert run("import", tmp_path, tmp_path / "out").exit_code == 1
    assert not (tmp_path / "out").exists()


def test_only_file_of_a_series_loads(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00001.safetensors"
    save_file(HALVES[0], path)
    assert sorted(jct.load(tmp_path)) == sorted(jct.load(path)) == ["a", "b"]


def test_header_may_have_extra_fields_and_spaces(tmp_path: Path) -> None:
    head = {
        "__metadata__": {"k": "\u00e9"},
        "\u00e9/\t": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8], "x": 1},
    }
    text = json.dumps(head, indent=1).encode() + b"  \n"
    (tmp_path / "a.safetensors").write_bytes(header(text, np.array([1, 2], np.int32).tobytes()))
    assert jct.load(tmp_path / "a.safetensors")["\u00e9/\t"].tolist() == [1, 2]
