"""Files that somebody else made: only our errors, at once; whatever stands where a file should, nobody waits for it.

The whole campaign is `make hostile`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store import manifest as manifest_module
from jaxckpt_train.store import transaction as transaction_module
from tests.crash.explorer import small_sizes
from tests.faults.hostile import LONGEST_S, Found, Targets, campaign, execute, guided, why_not_guided
from tests.steps.runs import made_run, state_of, step_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def _small() -> Iterator[None]:
    with small_sizes():
        yield


@pytest.mark.usefixtures("_small")
def test_sound_files_are_taken() -> None:
    found = Found()
    for name, (data, target) in Targets().all.items():
        execute(found, name, target, data)
    assert {end for _, end in found.ends} == {"taken"}


@pytest.mark.usefixtures("_small")
def test_changed_files_raise_only_our_errors() -> None:
    found = campaign(20_000, seed=0)
    assert found.problems == []
    refused = {name for name, end in found.ends if end == "refused"}
    assert refused >= {"segment header", "manifest", "load", "COMMIT", "lock", "value", "Flax file"}


@pytest.mark.usefixtures("_small")
def test_a_reader_that_expects_only_bad_json_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest_module, transaction_module):
        monkeypatch.setattr(module, "NOT_JSON", msgspec.ValidationError)
    assert campaign(3000, seed=0, names=["COMMIT", "manifest"]).problems


@pytest.mark.skipif(why_not_guided() is not None, reason=f"bytes are not led by what they reach: {why_not_guided()}")
def test_bytes_that_are_led_by_what_they_reach_raise_only_our_errors() -> None:
    assert guided(20_000, 0, ["manifest"]) == []


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_elsewhere(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def folder(path: Path) -> None:
    path.mkdir()


IN_PLACE: list[Callable[[Path], None]] = [
    fifo,
    link_to_nothing,
    link_to_a_device,
    link_to_itself,
    link_elsewhere,
    folder,
]
FILES = ("COMMIT", "manifest.json", "state/p00000-s000.safetensors")


@pytest.mark.parametrize("place", IN_PLACE)
@pytest.mark.parametrize("name", FILES)
def test_what_stands_in_place_of_a_file_is_refused_at_once(
    tmp_path: Path, name: str, place: Callable[[Path], None]
) -> None:
    run = made_run(tmp_path, 1, 2)
    path = run / "step-0000000002" / name
    path.unlink()
    place(path)
    started = time.monotonic()
    for read in (jct.load, jct.metadata) if name != FILES[2] else (jct.load,):
        with pytest.raises(jct.CheckpointError):
            read(run / "step-0000000002")
    assert not jct.verify(run / "step-0000000002").ok
    assert time.monotonic() - started < LONGEST_S
    assert step_of(jct.StepManager(run).restore({"state": state_of(0)})) == 1


@pytest.mark.parametrize("place", IN_PLACE)
@pytest.mark.parametrize("name", ["history.jsonl", "notes.jsonl", ".owner"])
def test_what_stands_in_place_of_a_file_of_the_run_costs_no_step(
    tmp_path: Path, name: str, place: Callable[[Path], None]
) -> None:
    run = made_run(tmp_path, 1, 2)
    (run / name).unlink(missing_ok=True)
    place(run / name)
    started = time.monotonic()
    manager = jct.StepManager(run)
    if name == "notes.jsonl":  # it may hold pins: who cannot know them must not go on, and delete
        with pytest.raises(jct.CheckpointError, match=r"notes\.jsonl"):
            manager.restore()
        (run / name).rmdir() if place is folder else (run / name).unlink()
    if name == ".owner":
        with pytest.raises(jct.CheckpointError):
            manager.own()
    assert step_of(manager.restore({"state": state_of(0)})) == 2
    assert time.monotonic() - started < 5 * LONGEST_S


def test_a_step_that_is_a_link_is_no_step(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    made_run(tmp_path / "other", 7)
    (run / "step-0000000007").symlink_to(tmp_path / "other" / "step-0000000007")
    assert jct.StepManager(run).steps == [1]


PERMISSIONS = """
import os, sys
import numpy as np
import jaxckpt_train as jct
os.umask(int(sys.argv[2], 8))
with jct.StepManager(sys.argv[1], preservation_policy=jct.LatestN(1)) as manager:
    for step in (1, 2):
        manager.save(step, {"state": {"w": np.ones(9)}, "value": jct.JsonValue({"a": 1})})
    manager.wait()
    manager.pin(2)
    print(oct(os.stat(sys.argv[1] + "/.owner").st_mode & 0o777))
"""


@pytest.mark.parametrize("umask", ["022", "002", "077", "000"])
def test_files_and_directories_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: str) -> None:
    command = [sys.executable, "-c", PERMISSIONS, str(tmp_path / "run"), umask]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    mask = int(umask, 8)
    assert done.stdout.strip() == oct(0o666 & ~mask)
    found = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(found) > 8
    for path in found:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_numbers_of_five_thousand_digits(tmp_path: Path) -> None:
    jct.save(tmp_path / "x", {"w": np.ones(3)})
    for name in ("COMMIT", "manifest.json"):
        data = json.loads((tmp_path / "x" / name).read_text())
        text = json.dumps(data).replace('"format_version": 1', '"format_version": ' + "9" * 5000)
        (tmp_path / "x" / name).write_text(text)
        with pytest.raises(jct.CheckpointError):
            jct.load(tmp_path / "x")
