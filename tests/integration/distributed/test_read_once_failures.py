"""Loads that read once per job, when a process fails, is stopped, or does something else."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import free_frames
from jaxckpt_train.pytree.placing import Placer
from jaxckpt_train.store.manifest import MANIFEST_NAME
from jaxckpt_train.store.reader import ReadBox
from tests.support.jobs.arrays import digest_of
from tests.support.jobs.counted_loads import Arrays, apart, save_alone, target_of
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running
from tests.support.tiers import nightly_after

LIMIT_S = 3.0
_once = threading.Lock()  # several threads read, and only the first one sends the signal
ARRAYS: Arrays = {"a": ([3072, 1024], "float32"), "b": ([2048, 3072], "float32"), "c": ([700], "float32")}


def load_together(path: str, spec: list[Any]) -> dict[str, Any]:
    """Load replicated or cut arrays."""
    return loaded_or_error(path, spec, None)


def loaded_or_error(path: str, spec: list[Any], progress: Any) -> dict[str, Any]:
    specs = {name: spec if len(shape) > 1 else [] for name, (shape, _) in ARRAYS.items()}
    settings = jct.StoreSettings(read_once=True, barrier_timeout_s=LIMIT_S)
    try:
        loaded = jct.load(path, target_of(ARRAYS, specs, [4]), settings=settings, progress=progress)
    except jct.CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
    return {"digest": digest_of(loaded)}


def load_until(path: str, spec: list[Any], who: int, when: str, number: int) -> dict[str, Any]:
    """Process `who` sends itself a signal while it reads, or while it waits for what others have read."""

    def progress(done: int) -> None:
        moments = ("reading", "looking") if done else ("moving",) if is_waiting() else ()
        if jax.process_index() == who and when in moments and _once.acquire(blocking=False):
            Path(path, "at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)

    with apart(is_apart=when != "looking"):
        return loaded_or_error(path, spec, progress)


def is_waiting() -> bool:
    return any(frame.name == "_wait_for" and "shared_reads" in frame.filename for frame in traceback.extract_stack())


@pytest.mark.parametrize(
    ("spec", "when", "number"),
    [
        ([], "reading", signal.SIGSTOP),
        ([None, "x"], "moving", signal.SIGKILL),
        pytest.param([None, "x"], "moving", signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param([], "moving", signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param([None, "x"], "looking", signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param([], "looking", signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param([], "moving", signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param([], "reading", signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_stopped_or_killed_process_is_named_in_time(tmp_path: Path, spec: list[Any], when: str, number: int) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    with running(4) as job:
        others = [0, 1, 3]
        for answer in job.outcomes(load_until, str(tmp_path / "c"), spec, 2, when, int(number), heard=others):
            assert answer["value"]["error"] == "CheckpointTimeoutError", answer
            assert "process 2 of 4" in answer["value"]["text"]
            assert answer["value"]["at"] < float((tmp_path / "c/at").read_text()) + LIMIT_S + 5.0


def load_from_a_slow_disk(path: str, who: int, is_apart: bool) -> dict[str, Any]:
    """The disk of process `who` does not respond until the others gave up, or for half a minute."""
    given_up = Path(path, "given up")

    def progress(done: int) -> None:
        if done and jax.process_index() == who and threading.current_thread() is not threading.main_thread():
            ends = time.monotonic() + 10 * LIMIT_S
            while not given_up.exists() and time.monotonic() < ends:
                time.sleep(0.1)

    with apart(is_apart=is_apart):
        answer = loaded_or_error(path, [], progress)
    given_up.touch()
    return answer


@pytest.mark.parametrize("is_apart", nightly_after(1, [False, True]))
def test_process_with_unresponsive_disk_is_named_in_time(tmp_path: Path, job_of: JobOf, is_apart: bool) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    answers = job_of(4, 1).call(load_from_a_slow_disk, str(tmp_path / "c"), 2, is_apart)
    assert [answer.get("error") for answer in answers] == ["CheckpointTimeoutError"] * 4, answers
    assert all("process 2 of 4" in answers[number]["text"] for number in (0, 1, 3))


@pytest.mark.parametrize("spec", [[], [None, "x"]])
@pytest.mark.parametrize("place", nightly_after(1, [0.6, 0.02]))
def test_damage_in_one_shard_reaches_all(tmp_path: Path, job_of: JobOf, spec: list[Any], place: float) -> None:
    save_alone(str(tmp_path / "good"), ARRAYS)
    save_alone(str(tmp_path / "bad"), ARRAYS)
    (segment,) = (tmp_path / "bad").rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[int(place * len(data))] ^= 1
    segment.write_bytes(data)
    job = job_of(4, 1)
    good = job.call(load_together, str(tmp_path / "good"), spec)
    answers = job.call(load_together, str(tmp_path / "bad"), spec)
    assert [answer.get("error") for answer in answers] == ["CorruptCheckpointError"] * 4
    assert all("leaf '" in answer["text"] for answer in answers)
    # One process found the damage, and the others report that process.
    assert sum("process " in answer["text"] for answer in answers) == 3
    assert job.call(load_together, str(tmp_path / "good"), spec) == good


def bytes_kept(path: str) -> int:
    """Return how many bytes of loaded arrays an error keeps alive after its frames were freed."""
    gc.collect()
    gc.disable()
    try:
        before = sum(array.nbytes for array in jax.live_arrays())
        settings = jct.StoreSettings(read_once=True, read_budget_bytes=4 << 20)
        try:
            jct.load(path, target_of(ARRAYS, {name: [] for name in ARRAYS}, [4]), settings=settings)
        except jct.CorruptCheckpointError as error:
            free_frames(error)
            return sum(array.nbytes for array in jax.live_arrays()) - before
    finally:
        gc.enable()
    return -1


def test_failed_load_keeps_no_arrays(tmp_path: Path, job_of: JobOf) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    (segment,) = (tmp_path / "c").rglob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[int(0.99 * len(data))] ^= 1
    segment.write_bytes(data)
    assert job_of(4, 1).call(bytes_kept, str(tmp_path / "c")) == [0] * 4


def load_unlike(path: str, other: str, who: int, kind: str) -> dict[str, Any]:
    """Load in a job in which process `who` does something else, as `kind` says."""
    if jax.process_index() == who:
        match kind:
            case "checkpoint":
                return load_together(other, [])
            case "sharding":
                return load_together(path, ["x"])
            case "refusal":
                return loaded_or_error(path, [], refuse)
            case "memory":
                return load_without_memory(path)
    return load_together(path, [])


def load_without_memory(path: str) -> dict[str, Any]:
    """Load without memory for the data of other processes."""

    def take(arrivals: Placer, read: ReadBox) -> None:
        raise MemoryError("there is none")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placer, "take", take)
        try:
            return loaded_or_error(path, [], None)
        except MemoryError as error:
            return {"error": "OtherProcessError", "text": f"MemoryError: {error}"}


def refuse(done: int) -> None:
    if done:
        raise jct.SettingsError("no more of it")


@pytest.mark.parametrize("who", nightly_after(1, [2, 0]))
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("checkpoint", "OtherProcessError", "which is another checkpoint"),
        ("sharding", "OtherProcessError", "or onto other devices"),
        ("refusal", "SettingsError", "no more of it"),
        ("memory", "OtherProcessError", "MemoryError: there is none"),
    ],
)
def test_different_load_in_one_process_fails_in_all(
    tmp_path: Path, job_of: JobOf, who: int, kind: str, error: str, text: str
) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    save_alone(str(tmp_path / "other"), ARRAYS)
    job = job_of(4, 1)
    for answer in job.call(load_unlike, str(tmp_path / "c"), str(tmp_path / "other"), who, kind):
        assert answer.get("error") == error, answer
        assert text.format(who=who) in answer["text"]
    assert all("digest" in answer for answer in job.call(load_together, str(tmp_path / "c"), []))


def load_before_it_fails(path: str, who: int, kind: str, read_once: Any, spec: list[Any]) -> dict[str, Any]:
    """Process `who` fails before the rendezvous."""
    target: dict[str, Any] = target_of(ARRAYS, {**dict.fromkeys(ARRAYS, spec), "c": []}, [4])
    more = dict[str, Any]()
    if jax.process_index() == who:
        match kind:
            case "shape":
                target["a"] = jax.ShapeDtypeStruct((3,), "float32", sharding=target["a"].sharding)
            case "leaf":
                target["a"] = object()
            case "option":
                more["cast"] = "no flag"
            case "missing" | "loop" | "damaged":
                path = f"{path}-{kind}"
            case "refused":
                path = f"{path}-{'n' * 300}"
    settings = jct.StoreSettings(read_once=read_once, barrier_timeout_s=LIMIT_S)
    try:
        if kind == "named":
            targets = {"state": target, **({"none": None} if jax.process_index() == who else {})}
            return {"digest": digest_of(jct.load_checkpointables(path, targets, settings=settings)["state"])}
        return {"digest": digest_of(jct.load(path, target, settings=settings, **more))}
    except jct.CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error)}


FAILURES = {
    "shape": "MismatchError",
    "leaf": "UnsupportedLeafError",
    "option": "SettingsError",
    "missing": "NotACheckpointError",
    "loop": "CorruptCheckpointError",
    "refused": "StorageError",
    "damaged": "CorruptCheckpointError",
    "named": "MismatchError",
}
WHO = list(zip(FAILURES.items(), [0, 2] * 4, strict=True))


@pytest.mark.parametrize(
    ("failure", "who"), nightly_after(len(WHO), [*WHO, *((failure, 2 - who) for failure, who in WHO)])
)
def test_failure_of_one_before_rendezvous_reaches_all(
    tmp_path: Path, job_of: JobOf, failure: tuple[str, str], who: int
) -> None:
    (kind, error), path = failure, tmp_path / "c"
    save_alone(str(path), ARRAYS)
    (tmp_path / "c-loop").symlink_to("c-loop")
    shutil.copytree(path, tmp_path / "c-damaged")
    (tmp_path / "c-damaged" / MANIFEST_NAME).write_bytes(b"no manifest")
    job = job_of(4, 1)
    answers = job.call(load_before_it_fails, str(path), who, kind, True, [])
    assert [answer.get("error") for answer in answers] == [error] * 4, answers
    assert [f"process {who}, " in answer["text"] for answer in answers] == [number != who for number in range(4)]
    assert all("digest" in answer for answer in job.call(load_together, str(path), []))


@pytest.mark.parametrize("read_once", [True, "auto"])
def test_checkpoint_that_nobody_finds_is_missing_for_all(tmp_path: Path, job_of: JobOf, read_once: Any) -> None:
    job = job_of(4, 1)
    answers = job.call(load_before_it_fails, str(tmp_path / "c"), -1, "", read_once, [])
    assert [answer.get("error") for answer in answers] == ["NotACheckpointError"] * 4
    save_alone(str(tmp_path / "c"), ARRAYS)
    assert all("digest" in answer for answer in job.call(load_together, str(tmp_path / "c"), []))


def test_independent_loads_survive_failure_of_one(tmp_path: Path, job_of: JobOf) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    job = job_of(4, 1)
    answers = job.call(load_before_it_fails, str(tmp_path / "c"), 1, "missing", "auto", ["x"])
    assert [answer.get("error") for answer in answers] == [None, "NotACheckpointError", None, None]
    assert all("digest" in answer for answer in job.call(load_together, str(tmp_path / "c"), []))


def load_here(directory: str, who: int) -> dict[str, Any]:
    """Load from a name that means another directory in process `who`, as on a local disk."""
    with contextlib.chdir(Path(directory, "own" if jax.process_index() == who else ".")):
        return load_together("/proc/self/cwd/c", [])


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs a name that each process has for itself")
def test_other_checkpoint_of_same_name_is_detected(tmp_path: Path, job_of: JobOf) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    save_alone(str(tmp_path / "own" / "c"), ARRAYS)
    job = job_of(4, 1)
    for answer in job.call(load_here, str(tmp_path), 2):
        assert answer.get("error") == "OtherProcessError", answer
        assert "process 2 loads /proc/self/cwd/c" in answer["text"]
    assert all("digest" in answer for answer in job.call(load_here, str(tmp_path), -1))
