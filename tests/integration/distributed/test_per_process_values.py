"""Values that each process of a job has for itself: data positions, declared values, objects with files."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array
from tests.support.jobs.fixtures import JobOf


def uneven() -> Any:
    """A shard whose position depends on its records: the number of dropped records differs between processes."""
    n, i = jax.process_count(), jax.process_index()
    records = grain.MapDataset.range(400).shuffle(seed=5)[i::n].to_iter_dataset(grain.ReadOptions(num_threads=0))
    return iter(records.filter(lambda record: record % (i + 2) != 0).batch(4))


class Position:
    """An iterator with `get_state` and `set_state`, as a user writes it."""

    def __init__(self) -> None:
        self.at = 100 * jax.process_index()

    def get_state(self) -> Any:
        return {"at": self.at, "table": np.arange(self.at % 7), "pair": (1, "two")}

    def set_state(self, state: Any) -> None:
        assert state["pair"] == (1, "two")
        assert state["table"].tolist() == list(range(state["at"] % 7))
        self.at = state["at"]


class Notes:
    """Writes files of its own, one in each process."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    async def save(self, directory: Any) -> Any:
        text = self.text

        async def write() -> None:
            path = await directory.await_creation()
            (path / f"note-{jax.process_index()}.txt").write_text(text)

        return write()

    async def load(self, directory: Path) -> Any:
        async def read() -> None:
            self.text = (directory / f"note-{jax.process_index()}.txt").read_text()

        return read()


def generator() -> np.random.Generator:
    return np.random.default_rng(jax.process_index())


def save_own(directory: str) -> list[Any]:
    """Save values of this process, and return the values that follow them."""
    data, position, random = uneven(), Position(), generator()
    for _ in range(5):
        next(data)
    position.at += 3
    random.random(10)
    with jct.StepManager(directory) as manager:
        manager.save(
            1,
            {
                "state": {"w": global_array([8], [jax.device_count()], ["x"])},
                "data": data,
                "position": position,
                "random": jct.PerProcess(random.bit_generator.state),
                "same": jct.PerProcess({"all": [1, 2.5, None]}),
                "notes": Notes(f"of process {jax.process_index()}"),
            },
        )
    return [*(next(data).tolist() for _ in range(3)), position.at, random.random(), f"of process {jax.process_index()}"]


def restore_own(directory: str, names: list[str]) -> list[Any]:
    data, position, random, notes = uneven(), Position(), generator(), Notes()
    targets = {
        "data": data,
        "position": position,
        "random": jct.PerProcess(None),
        "same": jct.PerProcess(None),
        "notes": notes,
    }
    with jct.StepManager(directory) as manager:
        restored = manager.restore({name: targets[name] for name in names or targets})
    if "same" in restored:
        assert restored["same"] == jct.PerProcess({"all": [1, 2.5, None]})
    if names:
        return []
    random.bit_generator.state = restored["random"].value
    return [*(next(data).tolist() for _ in range(3)), position.at, random.random(), notes.text]


def test_each_process_gets_back_what_it_saved(tmp_path: Path, job_of: JobOf) -> None:
    run = str(tmp_path / "run")
    expected = job_of(4, 1).call(save_own, run)
    assert len({repr(answer) for answer in expected}) == 4
    assert job_of(4, 1).call(restore_own, run, []) == expected
    step = tmp_path / "run" / "step-0000000001"
    files = {name: sorted(path.name for path in (step / name).iterdir()) for name in ("data", "same", "notes")}
    assert files["data"] == [f"p0000{number}.json" for number in range(4)]
    assert files["same"] == ["p00000.json"]
    assert files["notes"] == [f"note-{number}.txt" for number in range(4)]
    assert jct.verify(step).ok


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data", "IteratorStateError: .* 4 processes, found 2"),
        ("random", "MismatchError: .*'random': .* 4 processes .* found 2"),
        ("position", "MismatchError: .*'position': .* 4 processes .* found 2"),
        ("same", None),
    ],
)
def test_other_process_count_loads_only_equal_values(
    tmp_path: Path, job_of: JobOf, name: str, expected: str | None
) -> None:
    run = str(tmp_path / "run")
    job_of(4, 1).call(save_own, run)
    outcomes = job_of(2, 4).outcomes(restore_own, run, [name])
    for outcome in outcomes:
        if expected is None:
            assert outcome == {"value": []}
        else:
            assert re.match(expected, outcome["error"]), outcome


def test_single_process_reads_value_of_one_process(tmp_path: Path, job_of: JobOf) -> None:
    job_of(4, 1).call(save_own, str(tmp_path / "run"))
    loaded = jct.load_checkpointables(
        tmp_path / "run" / "step-0000000001", {"random": None, "data": None, "state": None}
    )
    assert loaded["random"].value["bit_generator"] == "PCG64"
    assert loaded["data"]["processes"] == 4
    assert loaded["state"]["w"].tolist() == list(range(8))


def go_on(directory: str, on_mismatch: str) -> list[Any]:
    """Run a loop whose data cannot be resumed by another number of processes."""
    values = {"w": global_array([8], [jax.device_count()], ["x"])}
    seen = []
    with jct.CheckpointCallback(directory, data_on_mismatch=on_mismatch, save_interval_steps=2) as ckpt:  # type: ignore[arg-type]
        state, data = ckpt.resume(values, uneven())
        for _ in ckpt.steps(ckpt.completed_steps + 4):
            seen.append(next(data).tolist())
            ckpt(state)
    return seen


def test_mismatching_data_restarts_or_skips_on_request(tmp_path: Path, job_of: JobOf) -> None:
    run = tmp_path / "run"
    job_of(4, 1).call(go_on, str(run), "error")
    for outcome in job_of(2, 1).outcomes(go_on, str(run), "error"):
        assert outcome["error"].startswith("IteratorStateError: "), outcome
    anew = job_of(2, 1).call(go_on, str(tmp_path / "other"), "error")
    skipping, restarting = (jct.StepManager(tmp_path / name).directory for name in ("skip", "restart"))
    for copy in (skipping, restarting):
        shutil.copytree(run, copy)
    assert job_of(2, 1).call(go_on, restarting, "restart") == anew
    beyond = job_of(2, 1).call(go_on, str(tmp_path / "other"), "error")
    assert job_of(2, 1).call(go_on, skipping, "skip") == beyond


@pytest.mark.parametrize("name", ["data", "random"])
def test_missing_value_of_one_process_is_found(tmp_path: Path, job_of: JobOf, name: str) -> None:
    run = tmp_path / "run"
    job_of(4, 1).call(save_own, str(run))
    step = run / "step-0000000001"
    manifest = json.loads((step / "manifest.json").read_text())
    part = next(part for part in manifest["parts"] if part["name"] == name)
    part["files"] = part["files"][:2]
    data = json.dumps(manifest, separators=(",", ":")).encode()
    (step / "manifest.json").write_bytes(data)
    commit = json.loads((step / "COMMIT").read_text())
    commit |= {"manifest_bytes": len(data), "manifest_sha256": hashlib.sha256(data).hexdigest()}
    (step / "COMMIT").write_text(json.dumps(commit))
    for outcome in job_of(2, 1).outcomes(restore_own, str(run), [name]):
        assert re.search("4 processes.* found 2", outcome["error"]), outcome
