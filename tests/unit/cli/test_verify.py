"""`jaxckpt verify` and `jaxckpt scrub`: every damage is found and named, and nothing is changed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.cli.maintain import _Pace
from tests.support.commands import json_of, printed, refused
from tests.support.locks import is_owned
from tests.support.runs import (
    DAMAGE,
    damaged,
    files_below,
    flip_a_payload_byte,
    folder_of,
    made_run,
    save_steps,
    step_path,
)


def test_a_whole_checkpoint_is_fine(tmp_path: Path) -> None:
    saved = jct.save(tmp_path / "c", {"w": np.arange(1000)})
    assert json_of("verify", tmp_path / "c") == {
        "path": str(tmp_path / "c"),
        "ok": True,
        "bytes": saved.bytes,
        "problems": [],
        "damaged": False,
        "skipped": [],
    }
    assert printed("verify", tmp_path / "c").startswith(f"{tmp_path / 'c'}: ok, ")


def test_verify_uses_newest_or_given_step(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    assert json_of("verify", run)["path"] == str(step_path(run, 2))
    assert json_of("verify", run, "--step", 1)["path"] == str(step_path(run, 1))


def test_flipped_byte_names_file_with_code_1(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    flip_a_payload_byte(step_path(run, 2))
    before = files_below(run)
    found = json_of("verify", run, code=1)
    assert found["ok"] is False
    (problem,) = found["problems"]
    assert f"{step_path(run, 2)}/state/p00000-s000.safetensors" in problem
    text = printed("verify", run, code=1)
    assert problem in text
    assert "DAMAGED" in text
    assert files_below(run) == before


def test_only_compared_bytes_are_counted(tmp_path: Path) -> None:
    saved = jct.save_checkpointables(
        tmp_path / "c", {"a": {"w": np.zeros(3000)}, "b": {"w": np.ones(700)}, "data": jct.JsonValue([1])}
    )
    segment = folder_of(tmp_path / "c") / "a" / "p00000-s000.safetensors"
    rest = saved.bytes - segment.stat().st_size
    assert json_of("verify", tmp_path / "c")["bytes"] == saved.bytes
    content = bytearray(segment.read_bytes())
    segment.write_bytes(content[:-1] + b"x")
    assert json_of("verify", tmp_path / "c", code=1)["bytes"] == saved.bytes  # it is compared, and differs
    assert printed("verify", tmp_path / "c", code=1).endswith("DAMAGED, 36.9 KiB compared\n")
    segment.unlink()
    assert json_of("verify", tmp_path / "c", code=1)["bytes"] == rest == jct.verify(tmp_path / "c").checked_bytes
    assert printed("verify", tmp_path / "c", code=1).endswith("DAMAGED, 9.5 KiB of 36.9 KiB compared\n")


@damaged
def test_every_damaged_file_is_named_with_code_1(tmp_path: Path, damage, file: str) -> None:
    run = made_run(tmp_path / "run", 1)
    damage(step_path(run, 1))
    if file in ("COMMIT", "manifest.json"):  # it cannot be opened
        assert file in refused("verify", step_path(run, 1), code=1)
    else:
        assert file in "".join(json_of("verify", step_path(run, 1), code=1)["problems"])


def test_foreign_directory_exits_with_3(tmp_path: Path) -> None:
    from safetensors.numpy import save

    (tmp_path / "w.safetensors").write_bytes(save({"w": np.zeros(3)}))
    assert "expected a checkpoint with digests" in refused("verify", tmp_path / "w.safetensors", code=3)
    refused("verify", tmp_path / "gone", code=3)


def test_scrub_finds_each_damaged_step_and_changes_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", *range(1, len(DAMAGE) + 3))
    files = {}
    for step, (damage, file) in enumerate(DAMAGE.values(), 2):
        damage(step_path(run, step))
        files[step_path(run, step).name] = file
    before = files_below(run)
    found = {each["name"]: each["problem"] for each in json_of("scrub", run, code=1)["steps"]}
    assert list(found) == [step_path(run, step).name for step in range(len(DAMAGE) + 2, 0, -1)]  # the newest first
    assert {name for name, problem in found.items() if problem is not None} == set(files)
    assert all(files[name] in problem for name, problem in found.items() if problem is not None)
    text = printed("scrub", run, code=1)
    assert f"{len(DAMAGE) + 2} steps, {len(DAMAGE)} damaged" in text
    assert all(name in text for name in files)
    assert files_below(run) == before
    assert not is_owned(run)


def test_scrub_of_whole_run_reads_all_of_it(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    found = json_of("scrub", run)
    assert found == {
        "run": str(run),
        "steps": [{"name": step_path(run, step).name, "problem": None, "damaged": False} for step in (2, 1)],
    }
    assert printed("scrub", run).startswith("2 steps, 0 damaged, ")


def test_scrub_reads_what_a_live_owner_has(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        save_steps(manager, 1)
        assert len(json_of("scrub", tmp_path / "run")["steps"]) == 1


def test_scrub_keeps_to_its_rate() -> None:
    pace, began = _Pace(1e6, lambda nbytes: None), time.monotonic()
    for _ in range(4):
        pace(25_000)
    assert time.monotonic() - began >= 0.1
    assert pace.nbytes == 100_000


@pytest.mark.parametrize("rate", ["0", "-1", "nan"])
def test_invalid_rate_is_refused(tmp_path: Path, rate: str) -> None:
    assert "--mib-per-second: expected a number above 0" in refused(
        "scrub", tmp_path, f"--mib-per-second={rate}", code=2
    )


def test_scrub_without_a_run_exits_with_3(tmp_path: Path) -> None:
    refused("scrub", tmp_path, code=3)
    refused("scrub", tmp_path / "gone", code=3)
