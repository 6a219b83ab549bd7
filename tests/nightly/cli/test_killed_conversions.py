"""`jaxckpt import` and `export` that are killed, interrupted, or would write into a running run: what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from tests.support.commands import json_of, refused
from tests.support.runs import REPO_ROOT, made_run, state_of

WAYS = {"import": ["import"], "safetensors": ["export", "--to", "safetensors"], "orbax": ["export", "--to", "orbax"]}


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


@pytest.mark.parametrize("way", WAYS)
def test_next_conversion_removes_killed_attempt(tmp_path: Path, way: str) -> None:
    state = {f"w{number}": np.random.default_rng(number).random(8 << 20) for number in range(2)}
    jct.save(tmp_path / "a", state)
    command, *options = WAYS[way]
    words = [sys.executable, "-m", "jaxckpt_train.cli", command, str(tmp_path / "a"), str(tmp_path / "b"), *options]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(REPO_ROOT)}, stdout=subprocess.DEVNULL)
    while names(tmp_path) == {"a"}:  # until it starts to write
        assert process.poll() is None
    process.kill()
    process.wait()
    (left,) = names(tmp_path) - {"a"}
    assert left.startswith(".b.tmp-")
    json_of(command, tmp_path / "a", tmp_path / "b", *options)
    assert names(tmp_path) == {"a", "b"}
    found = jct.load(tmp_path / "b")
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in state.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_conversion_into_a_running_run_is_refused(tmp_path: Path, way: str) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(3)})
    command, *options = WAYS[way]
    made_run(tmp_path / "run", 1)
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(2, state_of(2))
        manager.wait()
        before = names(tmp_path / "run")
        message = refused(command, tmp_path / "a", tmp_path / "run" / "step-0000000099", *options, code=4)
        assert names(tmp_path / "run") == before
    assert "owned by" in message
    assert "would not see a new step" in message


def test_name_of_unfinished_save_is_refused(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(3)})
    name = ".b.tmp-00000000-00000000-1-1-0"
    assert "reserved for unfinished saves" in refused("import", tmp_path / "a", tmp_path / name, code=2)
    assert names(tmp_path) == {"a"}


def test_the_manifest_says_where_an_import_comes_from(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": np.ones(3)})
    json_of("export", tmp_path / "a", tmp_path / "orbax", "--to", "orbax")
    json_of("import", tmp_path / "orbax", tmp_path / "b")
    json_of("import", tmp_path / "b", tmp_path / "c")
    for name, source in (("b", "orbax"), ("c", "b")):
        info = json.loads((tmp_path / name / "manifest.json").read_bytes())["info"]
        assert (info["imported_from"], info["imported_kind"]) == (str(tmp_path / source), "Orbax")


def waits_in_an_open(process: subprocess.Popen[str]) -> bool:
    """Return whether a thread of the process waits for a writer of a pipe that it opens."""
    with contextlib.suppress(OSError):  # a thread that has just ended
        return "wait_for_partner" in [each.read_text() for each in Path(f"/proc/{process.pid}/task").glob("*/wchan")]
    return False


@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="this system does not show what threads wait for")
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("size", [3, 1 << 20], ids=["read with others", "alone"])
@pytest.mark.parametrize("way", WAYS)
def test_interrupt_ends_conversion_on_hung_disk(tmp_path: Path, way: str, size: int) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "a", {"w": np.ones(size), "v": np.ones((2, 3))})
    (tmp_path / "a" / "w" / "0").unlink()
    os.mkfifo(tmp_path / "a" / "w" / "0")
    command, *options = WAYS[way]
    words = [sys.executable, "-m", "jaxckpt_train.cli", command, str(tmp_path / "a"), str(tmp_path / "b"), *options]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    process = subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not waits_in_an_open(process):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        outputs = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, *outputs) == (130, "", "")
    assert names(tmp_path) == {"a"}
