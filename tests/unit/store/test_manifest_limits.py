"""Limits of a manifest: content up to a limit is saved and read, and more is refused before it takes memory."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import numpy as np
import pytest

from jaxckpt_train.errors import CorruptCheckpointError, UnsupportedLeafError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import writer
from jaxckpt_train.store.manifest import (
    MAX_ARRAYS,
    MAX_PARTS,
    MIN_BLOCK_BYTES,
    Manifest,
    PartRecord,
    decode_manifest,
    encode_manifest,
)
from tests.support import checkpoints
from tests.support.checkpoints import commit
from tests.support.in_time import in_time
from tests.support.memory_backend import MemoryBackend
from tests.unit.store.test_manifest import GOOD, edited, put


def test_lists_longer_than_a_batch_are_decoded() -> None:
    boxes = {"chunks": [((n, n + 1), (0, 2)) for n in range(2000)]}
    arrays = {"chunks": np.zeros((2000, 2)), **{f"x{number}": np.zeros(3) for number in range(2000)}}
    arrays["blocks"] = np.zeros(20 << 20, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoints, writer):
            patch.setattr(module, "BLOCK_BYTES", MIN_BLOCK_BYTES)
        settings = StoreSettings(segment_bytes=1 << 20, io_threads=1)
        committed = commit(MemoryBackend(), "/runs/a", arrays, settings, boxes=boxes)
    data, digest = encode_manifest(committed.manifest), committed.manifest.parts[0].arrays[0].chunks[0].digests
    assert decode_manifest(data, "manifest") == committed.manifest
    for old, new in ((b'"dtype":"uint8"', b'"dtype":"int16"'), (b",1],[0,2]]", b",2],[0,2]]"), (digest.encode(), b"")):
        assert old in data
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(data.replace(old, new, 1), "manifest")


def test_text_that_looks_like_arrays_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("manifest", "transaction"):
        monkeypatch.setattr(f"jaxckpt_train.store.{module}.MAX_ARRAYS", 3)
    more = {"custom_metadata": [{"dtype": "float32", "chunks": [], "name": '},{"name":"'}] * 9}
    data = edited(put("info", more))
    assert len(decode_manifest(data, "manifest").parts[0].arrays) == 3
    monkeypatch.setattr("jaxckpt_train.store.manifest.MAX_ARRAYS", 2)
    with pytest.raises(CorruptCheckpointError, match="manifest: more than 2 arrays"):
        decode_manifest(data, "manifest")


def test_checkpointable_limit_is_same_for_save_and_load() -> None:
    def manifest_of(count: int) -> Manifest:
        parts = tuple(PartRecord(f"p{number}", "x", (), (), msgspec.Raw(b"null")) for number in range(count))
        return Manifest("jaxckpt", 1, "xxh3-128", MIN_BLOCK_BYTES, (), parts, {})

    assert decode_manifest(encode_manifest(manifest_of(MAX_PARTS)), "manifest") == manifest_of(MAX_PARTS)
    with pytest.raises(UnsupportedLeafError, match="at most 1,000 checkpointables, found 1,001"):
        encode_manifest(manifest_of(MAX_PARTS + 1))
    with pytest.raises(CorruptCheckpointError, match="at most length 1000"):
        decode_manifest(msgspec.json.encode(manifest_of(MAX_PARTS + 1)), "manifest")


def test_excess_arrays_are_refused_before_they_take_memory() -> None:
    content = json.loads(GOOD)
    empty = {"name": "", "shape": [0], "dtype": "int8", "chunks": [], "sharding": None}
    content["parts"][0]["arrays"] += [{**empty, "name": f"x{number}"} for number in range(2 * MAX_ARRAYS)]
    data = msgspec.json.encode(content)
    del content
    tracemalloc.start()
    with in_time():
        try:
            with pytest.raises(CorruptCheckpointError, match="x: more than 500,000 arrays"):
                decode_manifest(data, "x")
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_more_arrays_than_load_takes_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.store.transaction.MAX_ARRAYS", 3)
    backend = MemoryBackend()
    commit(backend, "/runs/a", {f"x{number}": np.zeros(3) for number in range(3)}, StoreSettings())
    with pytest.raises(UnsupportedLeafError, match="/runs/b: 4 arrays, expected at most"):
        commit(backend, "/runs/b", {f"x{number}": np.zeros(3) for number in range(4)}, StoreSettings())
    assert "b" not in [entry.name for entry in backend.list("/runs")]
