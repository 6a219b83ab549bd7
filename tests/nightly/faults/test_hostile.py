"""Hostile files raise only a `CheckpointError`, quickly; files of other kinds do not block a reader.

`make hostile` runs the whole campaign.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.store import committed
from jaxckpt_train.store import manifest as manifest_module
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults.hostile import (
    HAND_OUT,
    HANDED_OUT_BYTES,
    INFLATED_BYTES,
    INFLATED_EVERY,
    LONGEST_S,
    MEASURED_EVERY,
    Found,
    Targets,
    campaign,
    execute,
    guided,
    measure,
    why_not_guided,
)
from tests.nightly.faults.mutations import inflated
from tests.support.runs import made_run, state_of, step_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def _small() -> Iterator[None]:
    with small_sizes():
        yield


@pytest.mark.usefixtures("_small")
def test_valid_files_are_accepted() -> None:
    found = Found()
    for name, (data, target) in Targets().all.items():
        execute(found, name, target, data)
    assert {end for _, end in found.ends} == {"taken"}


@pytest.mark.usefixtures("_small")
def test_changed_files_raise_only_checkpoint_errors() -> None:
    found = campaign(14_000, seed=0)
    assert found.problems == []
    refused = {name for name, end in found.ends if end == "refused"}
    assert refused >= {"segment header", "segment", "manifest", "load", "COMMIT", "value", "iterator"}
    assert found.measured == 14_000 // MEASURED_EVERY


def greedy(data: bytes) -> None:
    """Allocate many times the size of the data."""
    raise CorruptCheckpointError(f"{len(20 * data)} bytes")


@pytest.mark.usefixtures("_small")
def test_memory_hungry_reader_is_detected() -> None:
    targets = {**Targets().all, "greedy": (b'{"a":[1,2,3]}', greedy)}
    found = campaign(2 * INFLATED_EVERY, seed=0, names=["greedy"], targets=targets)
    assert found.problems
    assert all("greedy: took " in problem and " bytes of memory for " in problem for problem in found.problems)


@pytest.mark.usefixtures("_small")
def test_inflated_files_stay_within_time_and_memory() -> None:
    for name, (data, target) in Targets().all.items():
        found, chance = Found(), random.Random(name)
        for _ in range(4):
            large = inflated(data, chance, HANDED_OUT_BYTES if name in HAND_OUT else INFLATED_BYTES)
            execute(found, name, target, large)
            measure(found, name, target, large)
        assert found.problems == []


def leaves_of(manifest: Any) -> Any:
    return manifest["parts"][0]["detail"]["leaves"]


def renamed(name: str) -> Callable[[Any], None]:
    """Add a leaf under another path."""
    return lambda manifest: leaves_of(manifest).update({name: {"kind": "int", "value": "1"}})


def empty_of(*shape: int) -> Callable[[Any], None]:
    """Give the empty array another shape."""
    return lambda manifest: array_of(manifest, "none").update(shape=list(shape))


def array_of(manifest: Any, name: str) -> Any:
    return next(array for array in manifest["parts"][0]["arrays"] if array["name"] == name)


MANIFESTS: dict[str, Callable[[Any], None]] = {
    "metrics that are a list": lambda manifest: manifest["info"].update(metrics=[1]),
    "metrics that are a text": lambda manifest: manifest["info"].update(metrics="loss"),
    "metrics of None": lambda manifest: manifest["info"].update(metrics={"a": None}),
    "metrics of 400 digits": lambda manifest: manifest["info"].update(metrics={"a": 10**400}),
    "a key that is no float": renamed("~fzz"),
    "a key that exceeds a float": renamed("~f0x1p99999"),
    "a key of 5000 digits": renamed("9" * 5000),
    "a key of 5000 tuples": renamed("~t" * 5000),
    "a PRNG of someone else": lambda manifest: leaves_of(manifest).update(one={"kind": "key", "impl": "mine"}),
    "nothing, huge": empty_of(2**62, 0),
    "nothing that wraps around": empty_of(2**61, 2**61, 0),
    "nothing in 64 dimensions": empty_of(*[0] * 64),
}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_earlier_failing_manifests_raise_checkpoint_errors(change: Callable[[Any], None]) -> None:
    targets, found = Targets(), Found()
    manifest = json.loads(targets.all["manifest"][0])
    change(manifest)
    data = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()
    for name in ("manifest", "load", "metadata", "steps", "verify"):
        execute(found, name, targets.all[name][1], data)
    assert found.problems == []


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("metrics", ["[1]", '"loss"', '{"a":1' + "0" * 400 + "}"])
def test_invalid_metrics_in_notes_are_ignored(metrics: str) -> None:
    targets, found = Targets(), Found()
    data, target = targets.all["notes"]
    execute(found, "notes", target, data.replace(b'{"a": 1.0}', metrics.encode()))
    assert found.ends == {("notes", "taken"): 1}


@pytest.mark.usefixtures("_small")
def test_invalid_dtype_of_iterator_is_refused() -> None:
    targets, found = Targets(), Found()
    data, target = targets.all["iterator"]
    assert b'"<i8"' in data
    execute(found, "iterator", target, data.replace(b'"<i8"', b'"(1,,)i4"'))
    assert found.ends == {("iterator", "refused"): 1}


@pytest.mark.usefixtures("_small")
def test_reader_with_unhandled_json_errors_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest_module, committed):
        monkeypatch.setattr(module, "NOT_JSON", msgspec.ValidationError)
    assert campaign(3000, seed=0, names=["COMMIT", "manifest"]).problems


@pytest.mark.skipif(why_not_guided() is not None, reason=f"bytes are not guided: {why_not_guided()}")
def test_guided_bytes_raise_only_checkpoint_errors() -> None:
    assert guided(10_000, 0, ["manifest"]) == []


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
def test_non_regular_files_are_refused_at_once(tmp_path: Path, name: str, place: Callable[[Path], None]) -> None:
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
@pytest.mark.parametrize("name", ["history.jsonl", "notes.jsonl", "record", ".lock"])
def test_non_regular_files_cost_no_step(tmp_path: Path, name: str, place: Callable[[Path], None]) -> None:
    run = made_run(tmp_path, 1)
    with jct.StepManager(run) as owner:
        owner.pin(1)
        owner.save(2, {"state": state_of(2)})
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    place(run / name)
    started = time.monotonic()
    manager = jct.StepManager(run, preservation_policy=jct.LatestN(1))
    if name == "record":  # its pins are unknown, so nothing may be deleted
        with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as owner:
            owner.restore()
            owner.save(2, {"state": state_of(2)}, overwrite=True)
            with contextlib.nullcontext() if place is folder else pytest.raises(jct.CheckpointError, match="record"):
                owner.pin(1)
        assert (run / "step-0000000001").exists()
    if name == ".lock" and place is not folder:
        with pytest.raises(jct.CheckpointError):
            manager.own()
    assert step_of(manager.restore({"state": state_of(0)})) == 2
    assert time.monotonic() - started < 5 * LONGEST_S


def test_linked_step_is_not_listed(tmp_path: Path) -> None:
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
    print(oct(os.stat(sys.argv[1] + "/.lock/0000000001.json").st_mode & 0o777))
"""


@pytest.mark.parametrize("umask", ["022", "002", "077", "000"])
def test_file_permissions_follow_the_umask(tmp_path: Path, umask: str) -> None:
    command = [sys.executable, "-c", PERMISSIONS, str(tmp_path / "run"), umask]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    mask = int(umask, 8)
    assert done.stdout.strip() == oct(0o666 & ~mask)
    found = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(found) > 8
    for path in found:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_version_of_five_thousand_digits_is_refused(tmp_path: Path) -> None:
    jct.save(tmp_path / "x", {"w": np.ones(3)})
    for name in ("COMMIT", "manifest.json"):
        data = json.loads((tmp_path / "x" / name).read_text())
        text = json.dumps(data).replace('"format_version": 1', '"format_version": ' + "9" * 5000)
        (tmp_path / "x" / name).write_text(text)
        with pytest.raises(jct.CheckpointError):
            jct.load(tmp_path / "x")
