"""A checkpoint saved by all processes of a job: its bytes, which process writes them, and refusals in all processes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array, values_of
from tests.support.jobs.fixtures import JobOf


def save_arrays(path: str, arrays: dict[str, list[Any]], snapshot: str = "auto") -> dict[str, Any]:
    tree = {name: global_array(*arguments) for name, arguments in arrays.items()}
    done = jct.save(path, tree, settings=jct.StoreSettings(snapshot=snapshot))  # type: ignore[arg-type]
    return {"bytes": done.bytes, "leaves": sorted(done.checkpointables["state"].leaves)}


def written_by(path: Path) -> Counter[int]:
    """Bytes of data by process."""
    manifest = json.loads((path / "manifest.json").read_text())
    counts: Counter[int] = Counter()
    for part in manifest["parts"]:
        for array in part["arrays"]:
            for _, segment, _, length, _ in array["chunks"]:
                counts[int(manifest["segments"][segment][0].partition("/p")[2][:5])] += length
    return counts


ARRAYS: dict[str, list[Any]] = {
    "rows": [[64, 6], [4], ["x"]],
    "replicated": [[1024, 1024], [4], []],
    "columns": [[8, 12], [4], [None, "x"]],
    "grid": [[8, 12], [2, 2], ["x", "y"]],
    "half": [[512, 1024], [2, 2], ["x"]],
    "both": [[16, 3], [2, 2], [["x", "y"]]],
    "odd": [[1021, 1031], [4], []],
    "scalar": [[], [4], []],
    "empty": [[0, 4], [4], []],
    "small": [[5], [2, 2], []],
    "bf16": [[300, 4096], [4], [], "int8"],
}


@pytest.mark.parametrize("snapshot", ["auto", "host", "device", "stream"])
def test_arrays_over_all_processes_are_saved_whole(tmp_path: Path, job_of: JobOf, snapshot: str) -> None:
    answers = job_of(4, 1).call(save_arrays, str(tmp_path / "c"), ARRAYS, snapshot)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["leaves"] == sorted(ARRAYS)
    loaded = jct.load(tmp_path / "c")
    for name, (shape, _, _, *dtype) in ARRAYS.items():
        expected = values_of(shape, *dtype)
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].tobytes() == expected.tobytes(), name
    assert jct.verify(tmp_path / "c").ok
    assert jct.metadata(tmp_path / "c").bytes == answers[0]["bytes"]


def test_replicated_arrays_are_shared_among_the_writers(tmp_path: Path, job_of: JobOf) -> None:
    arrays: dict[str, list[Any]] = {"a": [[4096, 1024], [4], []], "b": [[4099, 1021], [4], []], "c": [[700], [4], []]}
    job_of(4, 1).call(save_arrays, str(tmp_path / "c"), arrays)
    written = written_by(tmp_path / "c")
    total = sum(values_of(shape).nbytes for shape, *_ in arrays.values())
    assert sum(written.values()) == total
    assert max(written.values()) <= 0.3 * total


def save_local(path: str, who: int, kind: str) -> str:
    """Save values that each process holds locally; in process `who`, the one that `kind` names differs."""
    other = jax.process_index() == who
    tree: dict[str, Any] = {
        "w": global_array([8], [4], ["x"]),
        "count": 7,
        "table": np.arange(10),
        "local": jnp.arange(6.0),
        "key": jax.random.key(3),
    }
    more = {"note": jct.JsonValue({"a": 1})}
    if other:
        changed: dict[str, Any] = {
            "count": 8, "table": np.arange(10) + 1, "local": jnp.arange(6.0) * 2, "key": jax.random.key(4),
        }  # fmt: skip
        if kind in changed:
            tree[kind] = changed[kind]
        elif kind == "name":
            tree["other"] = tree.pop("count")
        elif kind == "json":
            more["note"] = jct.JsonValue({"a": 2})
        elif kind == "unsupported":
            tree["object"] = object()
        elif kind == "path":
            path = f"{path}-other"
    try:
        jct.save_checkpointables(path, {"state": tree, **more})
    except jct.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_equal_local_values_are_saved_once(tmp_path: Path, job_of: JobOf) -> None:
    assert job_of(4, 1).call(save_local, str(tmp_path / "c"), -1, "") == [""] * 4
    loaded = jct.load_checkpointables(tmp_path / "c")
    assert loaded["note"] == jct.JsonValue({"a": 1})
    state = loaded["state"]
    assert state["count"] == 7
    assert state["table"].tolist() == list(range(10))
    assert state["local"].tolist() == [0, 1, 2, 3, 4, 5]
    assert sum(written_by(tmp_path / "c").values()) == 8 * 4 + 10 * 8 + 6 * 4 + 2 * 4


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("count", "leaf 'state/count'"),
        ("table", "leaf 'state/table': its values"),
        ("local", "leaf 'state/local': its values"),
        ("key", "leaf 'state/key': its values"),
        ("name", "leaf 'state/other'"),
        ("json", "checkpointable 'note': its value"),
        ("unsupported", "checkpointable 'state': leaf 'object'"),
        ("path", "must save the same steps"),
    ],
)
def test_different_local_values_are_refused_by_name(
    tmp_path: Path, job_of: JobOf, who: int, kind: str, text: str
) -> None:
    for number, answer in enumerate(job_of(4, 1).call(save_local, str(tmp_path / "c"), who, kind)):
        assert text in answer, (number, answer)
        if kind not in ("unsupported", "path"):
            assert answer.startswith("MismatchError")
            assert f"differs in process {who}" in answer
    assert list(tmp_path.iterdir()) == []
