"""Exports as safetensors: the library and this package read back equal tensors."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxckpt_train as jct
from jaxckpt_train.formats import safetensors
from jaxckpt_train.formats.safetensors import Exported, export_safetensors
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import open_committed
from tests.support.model_states import llama, mnist
from tests.support.same_trees import assert_same, raw

BACKEND = LocalBackend()


def export(
    source: Path,
    folder: Path,
    separator: str = ".",
    shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] = types.MappingProxyType({}),
) -> Exported:
    committed = open_committed(BACKEND, str(source))
    return export_safetensors(
        BACKEND,
        committed,
        committed.manifest.parts[0],
        BACKEND,
        str(folder),
        StoreSettings(),
        separator=separator,
        shard_bytes=shard_bytes,
        single_file=False,
        metadata=metadata,
        progress=lambda nbytes: None,
    )


def test_the_library_reads_what_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = llama()
    monkeypatch.setattr(safetensors, "BAND_BYTES", 4096)  # several to a tensor
    jct.save(tmp_path / "a", state)
    found = export(tmp_path / "a", tmp_path / "out")
    assert found.files == ("model.safetensors",)
    assert found.left_out == ("name",)
    assert found.prng_keys == ("rngs/dropout",)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert raw(tensors["params.layers.attn.qkv"]) == raw(state["params"]["layers"]["attn"]["qkv"])
    assert tensors["params.layers.attn.qkv"].dtype == jnp.bfloat16
    assert raw(tensors["rngs.dropout"]) == raw(state["rngs"]["dropout"])
    assert int(tensors["step"]) == 12
    assert sum(tensor.nbytes for tensor in tensors.values()) == found.nbytes


def test_several_files_have_an_index(tmp_path: Path) -> None:
    state = {"layers": {str(number): jnp.full((100, 10), number, jnp.float32) for number in range(10)}}
    jct.save(tmp_path / "a", state)
    found = export(tmp_path / "a", tmp_path / "out", shard_bytes=9000, metadata={"made": "here"}, separator="/")
    assert len(found.files) == 5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 40_000
    assert sorted({*index["weight_map"].values()}) == sorted(found.files)
    for number in range(10):
        tensor = load_file(tmp_path / "out" / index["weight_map"][f"layers/{number}"])[f"layers/{number}"]
        assert (tensor == number).all()
    assert jct.metadata(tmp_path / "out").custom_metadata == {"made": "here"}


def test_exported_tensors_come_back_equal(tmp_path: Path) -> None:
    params = mnist().params
    jct.save(tmp_path / "a", {"params": params})
    export(tmp_path / "a", tmp_path / "out")
    back = jct.load(tmp_path / "out", {"params": jax.tree.map(jnp.zeros_like, params)}, transforms=[{"op": "nest"}])
    assert_same(back["params"], params)


def test_failed_export_leaves_no_files(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.arange(10_000.0), "v": np.arange(5000.0)})
    (segment,) = (tmp_path / "a" / "state").glob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-8] ^= 1
    segment.write_bytes(bytes(data))
    with pytest.raises(jct.CorruptCheckpointError):
        export(tmp_path / "a", tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": np.ones(2)}, "a.b": np.zeros(2)}, "leaf 'a.b' and 'a/b' would both be called 'a.b'"),
        ({"a": jnp.ones(3, jnp.int4)}, "leaf 'a' has the dtype int4, .* cast it"),
        ({"a": 2**70}, "leaf 'a': expected at most 64 bits, found 71"),
        ({"a": "text"}, "'state' has no arrays to export"),
    ],
)
def test_unexportable_values_are_refused_before_writing(tmp_path: Path, state: Any, message: str) -> None:
    jct.save(tmp_path / "a", state)
    with pytest.raises(jct.MismatchError, match=message):
        export(tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_does_not_overwrite_existing_file(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(3)})
    (tmp_path / "out").write_text("mine")
    with pytest.raises(jct.CheckpointExistsError, match="/out: "):
        export(tmp_path / "a", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("state", "separator"), [({"__metadata__": np.ones(1)}, "."), ({"__meta": {"ata__": np.ones(1)}}, "d")]
)
def test_tensor_named_like_format_metadata_is_refused(tmp_path: Path, state: Any, separator: str) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(2)} | state)
    with pytest.raises(jct.MismatchError, match="would be called '__metadata__'"):
        export(tmp_path / "a", tmp_path / "out", separator=separator)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]
