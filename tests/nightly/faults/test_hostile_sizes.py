"""Files with implausibly large parts are refused in time, and before they take memory."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store.committed import CommitRecord
from jaxckpt_train.store.manifest import FORMAT, FORMAT_VERSION, decode_manifest
from tests.support.in_time import in_time
from tests.support.runs import made_run, state_of, step_of

SOME_BYTES = 4 << 20  # of memory in addition to the file
EMPTY = {"name": "a", "shape": [0], "dtype": "int8", "chunks": [], "sharding": None}
DIGEST = "0" * 32


def many(element: str, count: int) -> bytes:
    return f"[{','.join([element] * count)}]".encode()


def manifest(arrays: bytes = b"[]", segments: bytes = b"[]", files: bytes = b"[]", **fields: Any) -> bytes:
    """Encode a manifest of one checkpointable with these lists."""
    part = {"name": "state", "kind": "pytree", "arrays": msgspec.Raw(arrays), "files": msgspec.Raw(files), "detail": {}}
    content: dict[str, Any] = {"format": "jaxckpt", "format_version": 1, "digest": "xxh3-128", "block_bytes": 4 << 20}
    content |= {"segments": msgspec.Raw(segments), "parts": [part], "info": {}}
    return msgspec.json.encode({**content, **fields})


def array(**fields: Any) -> str:
    raw = {name: msgspec.Raw(value) if isinstance(value, bytes) else value for name, value in fields.items()}
    return msgspec.json.encode({**EMPTY, **raw}).decode()


def arrays(elements: Iterable[str]) -> bytes:
    return manifest(f"[{','.join(elements)}]".encode())


def deep(opening: str, closing: str, levels: int) -> bytes:
    return (opening * levels + "0" + closing * levels).encode()


def parts(count: int) -> list[dict[str, Any]]:
    return [{"name": f"p{n}", "kind": "x", "arrays": [], "files": [], "detail": None} for n in range(count)]


MANIFESTS: dict[str, Callable[[], bytes]] = {
    "a shape of zeros": lambda: arrays([array(shape=many("0", 2_000_000))]),
    "a shape of large numbers": lambda: arrays([array(shape=many("999999999", 400_000))]),
    "a shape of numbers of 5,000 digits": lambda: arrays([array(shape=many("9" * 5000, 500))]),
    "a sharding of lists": lambda: arrays([array(sharding=many("[]", 1_000_000))]),
    "shardings of lists": lambda: arrays(array(name=f"{n}", sharding=many("[]", 1000 + n)) for n in range(1000)),
    "a deep sharding": lambda: arrays([array(sharding=deep('{"a":', "}", 500_000))]),
    "a dtype": lambda: arrays([array(dtype="f" * 3_000_000)]),
    "arrays with spaces between them": lambda: manifest(many(array() + " ", 500_000)),
    "arrays that are numbers": lambda: manifest(many("0", 3_000_000)),
    "arrays that are empty": lambda: manifest(many("{}", 1_500_000)),
    "arrays by another spelling": lambda: manifest(many(array().replace("dtype", "\\u0064type"), 1_000_000)),
    "chunks that are numbers": lambda: arrays([array(shape=[5], chunks=many("0", 3_000_000))]),
    "chunks of nothing": lambda: arrays([array(shape=[5], chunks=many('[[],0,0,0,""]', 300_000))]),
    "chunks that end too early": lambda: arrays([array(shape=[5], chunks=many('[[[0,5]],0,0,5,""]', 300_000))]),
    "a box of a million dimensions": lambda: arrays(
        [array(shape=[5], chunks=b"[[" + many("[0,5]", 1_000_000) + f',0,4096,5,"{DIGEST}"]]'.encode())]
    ),
    "segments of nothing": lambda: manifest(segments=many('["",0,0,""]', 400_000)),
    "segments without chunks": lambda: manifest(
        segments=msgspec.json.encode([[f"state/a{n}", 9, 9, DIGEST] for n in range(300_000)])
    ),
    "files of nothing": lambda: manifest(files=many('["",0,""]', 400_000)),
    "a path": lambda: manifest(files=b'[["state' + b"/" * 3_000_000 + b'",0,""]]'),
    "a way out, often": lambda: manifest(files=many('["state/../../../etc/passwd",0,""]', 100_000)),
    "checkpointables": lambda: manifest(parts=parts(300_000)),
    "checkpointables of nothing": lambda: manifest(parts=msgspec.Raw(many("{}", 1_500_000))),
    "checkpointables with long names": lambda: manifest(parts=[{**parts(1)[0], "name": "x" * 3_000_000}]),
    "deep info": lambda: manifest(info={"a": msgspec.Raw(deep("[", "]", 200_000))}),
    "a digest": lambda: manifest(digest="x" * 3_000_000),
    "a format": lambda: manifest(format="x" * 3_000_000),
    "a version of 5,000 digits": lambda: manifest(format_version=msgspec.Raw(b"9" * 5000)),
    "keys that are not ours": lambda: manifest(**{f"k{n}": 0 for n in range(200_000)}),
    "the same key": lambda: manifest().replace(b'"parts":', b'"parts":[],' * 2_000_000 + b'"parts":'),
    "the same version": lambda: manifest().replace(b'"digest":', b'"format_version":1,' * 2_000_000 + b'"digest":'),
    "the same kind": lambda: manifest().replace(b'"kind":', b'"kind":"",' * 2_000_000 + b'"kind":'),
    "the same list": lambda: manifest().replace(b'"arrays":', b'"arrays":' + many("[]", 1_000_000) + b',"arrays":'),
    "zeros": lambda: bytes(64 << 20),
    "spaces": lambda: b" " * (16 << 20),
    "brackets": lambda: b"[" * (16 << 20),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_hostile_manifest_is_refused_cheaply(name: str) -> None:
    data = MANIFESTS[name]()
    with in_time(), pytest.raises(jct.CheckpointError) as refused:
        decode_manifest(data, "manifest")
    assert len(str(refused.value)) < 1000
    tracemalloc.start()
    try:
        with pytest.raises(jct.CheckpointError):
            decode_manifest(data, "manifest")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(data) + SOME_BYTES


WELL_FORMED = {"arrays without elements": 4, "chunks that overlap": 7}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_well_formed_records_take_bounded_memory(name: str) -> None:
    """Only the last record, or all together, reveal the damage; until then a load needs them."""
    if name == "chunks that overlap":
        chunks = [[[[n, n + 5]], 0, 4096, 5, DIGEST] for n in range(100_000)]
        segments = msgspec.json.encode([["state/a", 4101, 4096, DIGEST]])
        data = manifest(
            f"[{array(shape=[100_004], dtype='uint8', chunks=msgspec.json.encode(chunks))}]".encode(), segments
        )
    else:
        data = arrays(array(name=f"{n % 100_000}") for n in range(100_001))
    with in_time(5):  # slower because memory is traced
        tracemalloc.start()
        try:
            with pytest.raises(CorruptCheckpointError, match=r"overlap|twice"):
                decode_manifest(data, "manifest")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < WELL_FORMED[name] * len(data) + SOME_BYTES


def replanted(path: Path, data: bytes) -> None:
    """Write another manifest, and a matching COMMIT."""
    (path / "manifest.json").write_bytes(data)
    commit = CommitRecord(FORMAT, FORMAT_VERSION, len(data), hashlib.sha256(data).hexdigest())
    (path / "COMMIT").write_bytes(msgspec.json.encode(commit))


def test_manifest_of_wrong_size_is_not_read(tmp_path: Path) -> None:
    jct.save(tmp_path / "x", {"w": np.ones(9)})
    os.truncate(tmp_path / "x" / "manifest.json", 256 << 20)
    for read in (jct.load, jct.metadata):
        with in_time():
            tracemalloc.start()
            try:
                with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: 268435456 bytes"):
                    read(tmp_path / "x")
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < SOME_BYTES


def test_oversized_manifest_of_step_is_held_once(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2)
    size = 64 << 20
    os.truncate(run / "step-0000000002" / "manifest.json", size)
    tracemalloc.start()
    try:
        assert jct.StepManager(run).steps == [1, 2]
        assert tracemalloc.get_traced_memory()[1] < size + SOME_BYTES
    finally:
        tracemalloc.stop()
    assert step_of(jct.StepManager(run).restore({"state": state_of(0)})) == 1


def with_huge_block(path: Path) -> None:
    """Write a manifest with one array of 2^40 bytes and a larger digest block, and a sparse segment."""
    content = json.loads((path / "manifest.json").read_text())
    size, header = 1 << 40, content["segments"][0][2]
    (found,) = content["parts"][0]["arrays"]
    found.update(shape=[size], dtype="uint8")
    found["chunks"][0][:] = [[[0, size]], 0, header, size, found["chunks"][0][4][:32]]
    content["block_bytes"], content["segments"][0][1] = 2 * size, header + size
    replanted(path, msgspec.json.encode(content))
    os.truncate(path / content["segments"][0][0], header + size)


def test_huge_block_size_falls_back_to_older_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with jct.StepManager(run) as manager:
        for step in (1, 2):
            manager.save(step, {"state": {"w": np.full(9000, step, np.uint8)}})
    with_huge_block(run / "step-0000000002")
    for read in (jct.load, jct.metadata):
        with pytest.raises(CorruptCheckpointError, match="block_bytes is 2199023255552"):
            read(run / "step-0000000002")
    assert "block_bytes is" in jct.verify(run / "step-0000000002").problems[0]
    assert jct.StepManager(run).restore()["state"]["w"][0] == 1
