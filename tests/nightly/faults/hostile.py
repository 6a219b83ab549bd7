"""Feed hostile files to all code that reads files.

`python -m tests.nightly.faults.hostile --executions 20000000`

Each target gets bytes in place of one file, and may only raise a `CheckpointError`. The bytes are valid files that were
changed at random, as JSON or as bytes; with `--atheris`, atheris chooses them instead, guided by coverage.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import hashlib
import importlib.util
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import tracemalloc
import types
from collections.abc import Callable
from pathlib import Path

import flax.serialization
import msgspec
import numpy as np
import pytest
import xxhash

from jaxckpt_train import checkpoint
from jaxckpt_train.checkpointables.iterator_state import encode_state
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.history import HISTORY_NAME, History
from jaxckpt_train.run.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.run.record import NOTES_NAME, RECORD_NAME, RunRecord, SaveFacts, seal_record
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.committed import CommitRecord, open_committed
from jaxckpt_train.store.manifest import (
    COMMIT_NAME,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    MANY,
    block_digests,
    decode_manifest,
    digest_function,
    encode_manifest,
)
from jaxckpt_train.store.segment import is_head_of
from jaxckpt_train.store.verify import _files_of, _tensors, verify
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.corruption import NEW, RUN, Files, made, planted
from tests.nightly.faults.mutations import changed, inflated
from tests.nightly.faults.needs import leave_if
from tests.support.checkpoints import commit
from tests.support.memory_backend import MemoryBackend

STEP = f"{RUN}/{NEW}"
A_STATE = {"params": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": 3}, "step": np.int32(7), "none": None}
AN_ITERATOR = {
    "grain_version": "0", "iterator": "MapDatasetIterator", "workers": None, "processes": 1, "process": 0,
    "fingerprint": None,
    "state": encode_state(
        {"numpy": [np.float32(0.5), np.arange(3)], "tuple": (b"x", 2**70), "float": math.inf, 5: np.datetime64(1, "s")}
    ),
}  # fmt: skip
SLOW = {"load", "metadata", "segment", "steps", "verify", "Flax file", "value", "iterator"}
# These return the content as Python objects, which take much more memory, so their inflated files are smaller.
HAND_OUT = {"load", "metadata", "value", "iterator", "Flax file", "history", "notes", "record"}
SETTINGS = StoreSettings(io_threads=1)
LONGEST_S = 1.0
TRIES = 3
MOST_TIMES, MOST_MORE_BYTES = 2, 8 << 20  # allowed memory: a multiple of the file, and a constant
MEASURED_EVERY, INFLATED_EVERY = 200, 1000
FIRST_FILES = 200  # the changed files that atheris starts with
INFLATED_BYTES, HANDED_OUT_BYTES = 2_000_000, 100_000  # the first exceeds the limit of the info of a manifest


def replaced(files: Files, path: str, data: bytes) -> MemoryBackend:
    """Return a backend with one replaced file."""
    return planted({**files, path: data})


def with_manifest(files: Files, data: bytes) -> MemoryBackend:
    """Return a backend with a replaced manifest and a matching COMMIT."""
    commit = CommitRecord(FORMAT, FORMAT_VERSION, len(data), hashlib.sha256(data).hexdigest())
    changed = {**files, f"{STEP}/{MANIFEST_NAME}": data, f"{STEP}/{COMMIT_NAME}": msgspec.json.encode(commit)}
    return planted(changed)


def a_lock() -> bytes:
    """Return the content of a lock."""
    backend = MemoryBackend()
    backend.make_directory(RUN, parents=True, sync=False)
    lock = OwnerLock(backend, RUN)
    lock.acquire()
    try:
        found = backend.read_record(lock.path)
        assert found is not None
        return found.data
    finally:
        lock.release()


A_RECORD = RunRecord(number=1, pins=frozenset({2}), saves={NEW: SaveFacts("2026-01-01T00:00:00+00:00", {"a": 1.0})})


def a_manifest_of_many_chunks() -> bytes:
    """Return a manifest with enough chunks for the bulk checks."""
    backend, rows = MemoryBackend(), 2 * MANY
    boxes = {"w": [((row, row + 1), (0, 2)) for row in range(rows)]}
    arrays = {"w": np.arange(2.0 * rows).reshape(rows, 2), "b": np.zeros(3)}
    return encode_manifest(commit(backend, "/many", arrays, SETTINGS, boxes=boxes).manifest)


AllTargets = dict[str, tuple[bytes, Callable[[bytes], object]]]


class Targets:
    """All readers of files, each with a valid file to start from."""

    def __init__(self) -> None:
        self.files = made("xxh3-128")
        note = {"number": 1, "step": 2, "name": NEW, "saved": "2026-01-01T00:00:00+00:00", "metrics": {"a": 1.0}}
        self.files[f"{RUN}/{NOTES_NAME}"] = json.dumps(note | {"pin": True, "held": [], "left_behind": []}).encode()
        self.files[f"{RUN}/{LOCK_NAME}/0000000001.json"] = a_lock()
        manifest = self.files[f"{STEP}/{MANIFEST_NAME}"]
        self.manifest = decode_manifest(manifest, "x")
        self.record = self.manifest.segments[0]
        self.data = self.files[f"{STEP}/{self.record.file}"][self.record.header_bytes :]
        head = self.files[f"{STEP}/{self.record.file}"][: self.record.header_bytes]
        self.tensors = list(_tensors(_files_of(self.manifest)[0][1], self.record.header_bytes))
        self.all: AllTargets = {
            "segment header": (head, self.head),
            "segment": (head, self.segment),
            "manifest": (manifest, lambda data: decode_manifest(data, "x")),
            "many chunks": (a_manifest_of_many_chunks(), lambda data: decode_manifest(data, "x")),
            "load": (manifest, self.load),
            "metadata": (manifest, self.metadata),
            "steps": (manifest, lambda data: scan(with_manifest(self.files, data), RUN)),
            "verify": (manifest, lambda data: verify(with_manifest(self.files, data), STEP, SETTINGS)),
            "COMMIT": (self.files[f"{STEP}/{COMMIT_NAME}"], self.open),
            "history": (self.files[f"{RUN}/{HISTORY_NAME}"], self.history),
            "notes": (self.files[f"{RUN}/{NOTES_NAME}"], self.notes),
            "record": (msgspec.json.encode(A_RECORD), self.run_record),
            "value": (self.files[f"{STEP}/config/p00000.json"], self.value),
            "iterator": (msgspec.json.encode(AN_ITERATOR), lambda data: self.value(data, kind="grain")),
            "Flax file": (flax.serialization.msgpack_serialize(A_STATE), self.flax_file),
            "lock": (self.files[f"{RUN}/{LOCK_NAME}/0000000001.json"], self.lock),
        }

    def head(self, data: bytes) -> None:
        """Compare the header of a segment with the manifest."""
        if not is_head_of(memoryview(data), self.tensors):
            raise CorruptCheckpointError("another head")

    def segment(self, data: bytes) -> None:
        """Verify the step with another header in its first segment, and a matching manifest."""
        digest, by = digest_function(self.manifest.digest)(data), len(data) - self.record.header_bytes
        manifest = json.loads(msgspec.json.encode(self.manifest))
        manifest["segments"][0][1:] = [self.record.bytes + by, len(data), digest]
        for part in manifest["parts"]:
            for chunk in (chunk for array in part["arrays"] for chunk in array["chunks"] if chunk[1] == 0):
                chunk[2] += by
        files = {**self.files, f"{STEP}/{self.record.file}": data + self.data}
        report = verify(with_manifest(files, msgspec.json.encode(manifest)), STEP, SETTINGS)
        if not report.ok:
            raise CorruptCheckpointError(report.problems[0])

    def load(self, data: bytes) -> None:
        """Load the step."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "backend_for", lambda _: with_manifest(self.files, data))
            checkpoint.load_checkpointables(STEP, settings=SETTINGS)

    def metadata(self, data: bytes) -> None:
        """Read the metadata of the step."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "backend_for", lambda _: with_manifest(self.files, data))
            repr((checkpoint.metadata(STEP), checkpoint.metadata(STEP).checkpointables))

    def value(self, data: bytes, kind: str = "json") -> None:
        """Load a value with a matching digest."""
        manifest = self.manifest
        text = msgspec.json.encode(manifest)
        digests = block_digests(np.frombuffer(data, np.uint8), manifest.block_bytes, digest_function(manifest.digest))
        (part,) = (part for part in manifest.parts if part.files)
        old = part.files[0]
        text = text.replace(msgspec.json.encode(old), msgspec.json.encode((old.file, len(data), digests)))
        text = text.replace(b'"kind":"json"', f'"kind":"{kind}"'.encode())
        backend = with_manifest({**self.files, f"{STEP}/{old.file}": data}, text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "backend_for", lambda _: backend)
            checkpoint.load_checkpointables(STEP, {"config": None}, settings=SETTINGS)

    def flax_file(self, data: bytes) -> None:
        """Load a checkpoint file of Flax."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "backend_for", lambda _: planted({"/file/state": data}))
            patch.setattr(checkpoint, "is_file", lambda backend, path: True)
            checkpoint.load("/file/state", settings=SETTINGS)

    def open(self, data: bytes) -> None:
        """Open the checkpoint."""
        open_committed(replaced(self.files, f"{STEP}/{COMMIT_NAME}", data), STEP)

    def history(self, data: bytes) -> None:
        """Read the history of a run."""
        History(replaced(self.files, f"{RUN}/{HISTORY_NAME}", data), RUN).events()

    def notes(self, data: bytes) -> None:
        """List the steps of a run of an earlier version."""
        scan(replaced(self.files, f"{RUN}/{NOTES_NAME}", data), RUN)
        sealed = data[:-1] + b',"xxh3_64":"' + xxhash.xxh3_64_hexdigest(data).encode() + b'"}'
        scan(replaced(self.files, f"{RUN}/{NOTES_NAME}", sealed), RUN)

    def run_record(self, data: bytes) -> None:
        """List the steps of a run."""
        for content in (data, seal_record(data)):
            scan(replaced(self.files, f"{RUN}/{RECORD_NAME}/0000000001.json", content), RUN)

    def lock(self, data: bytes) -> None:
        """Read the lock of a run."""
        OwnerLock(replaced(self.files, f"{RUN}/{LOCK_NAME}/0000000001.json", data), RUN).owner()


@dataclasses.dataclass
class Found:
    """The result of a campaign: executions by target and end, time, memory, and problems."""

    ends: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    longest_s: float = 0.0
    measured: int = 0
    most_more_bytes: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def execute(found: Found, name: str, target: Callable[[bytes], object], data: bytes) -> None:
    """Execute a target; repeat a slow execution, because the machine may be busy."""
    took_s = math.inf
    for _ in range(TRIES):
        started = time.perf_counter()
        try:
            target(data)
            end = "taken"
        except CheckpointError:
            end = "refused"
        except Exception:  # noqa: BLE001  # any other error is a problem
            end = "other"
            found.problems.append(f"{name}: {traceback.format_exc(limit=-3)}\n  of {data[:2000]!r}")
        took_s = min(took_s, time.perf_counter() - started)
        if took_s <= LONGEST_S:
            break
    found.longest_s = max(found.longest_s, took_s)
    found.ends[name, end] += 1
    if took_s > LONGEST_S:
        found.problems.append(f"{name}: took {took_s:.1f} s for {data[:2000]!r}")


def measure(found: Found, name: str, target: Callable[[bytes], object], data: bytes) -> None:
    """Execute a target once more, and measure its memory."""
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError):
            target(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    found.measured += 1
    found.most_more_bytes = max(found.most_more_bytes, peak - MOST_TIMES * len(data))
    if peak > MOST_TIMES * len(data) + MOST_MORE_BYTES:
        found.problems.append(f"{name}: took {peak:,} bytes of memory for {len(data):,}: {data[:2000]!r}")


def campaign(executions: int, seed: int, names: list[str] | None = None, targets: AllTargets | None = None) -> Found:
    """Execute the targets in random order, slow ones rarely; measure the memory of some."""
    found, chance, targets = Found(), random.Random(seed), targets or Targets().all
    chosen = names or list(targets)
    slow = SLOW & set(chosen)
    for number in range(executions):
        name = chance.choice([each for each in chosen if each not in slow or number % 30 == 0] or chosen)
        if number % INFLATED_EVERY == INFLATED_EVERY - 1:
            name = chance.choice(chosen)
        sound, target = targets[name]
        data = changed(sound, chance)
        if number % INFLATED_EVERY == INFLATED_EVERY - 1:
            data = inflated(sound, chance, HANDED_OUT_BYTES if name in HAND_OUT else INFLATED_BYTES)
        execute(found, name, target, data)
        if number % MEASURED_EVERY == MEASURED_EVERY - 1 and not found.problems:
            measure(found, name, target, data)
        if len(found.problems) > 20:
            break
    return found


def with_atheris(executions: int, seed: int, name: str) -> None:
    """Let atheris choose the bytes; it ends the process at the first problem."""
    import atheris

    targets, found = Targets(), Found()
    target = targets.all[name][1]

    def one(given: bytes) -> None:
        execute(found, name, target, given)
        if found.problems:
            raise AssertionError(found.problems[0])

    sound, chance = targets.all[name][0], random.Random(0)
    with tempfile.TemporaryDirectory() as folder:  # the initial corpus
        for number, first in enumerate([sound, *(changed(sound, chance) for _ in range(FIRST_FILES))]):
            (Path(folder) / str(number)).write_bytes(first)
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType) and (each.__module__ or "").startswith("jaxckpt_train."):
                atheris.instrument_func(each)
        options = [f"-runs={executions}", f"-seed={seed + 1}", f"-max_len={4 * len(sound)}", "-rss_limit_mb=8192"]
        atheris.Setup([sys.argv[0], *options, folder], one)
        atheris.Fuzz()


_DONE = re.compile(r"^Done ([0-9]+) runs", re.MULTILINE)


def guided(executions: int, seed: int, names: list[str]) -> list[str]:
    """Run atheris in a process for each target, and return the problems."""
    problems, share = [], str(share_of_guided(executions, names))
    for name in names:
        command = [sys.executable, "-m", "tests.nightly.faults.hostile", "--atheris", "--targets", name]
        command += ["--executions", share, "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        made = [int(count) for count in _DONE.findall(done.stderr)]  # may be slightly more than requested
        if done.returncode != 0 or max(made, default=0) < int(share):
            problems.append(f"{name}: ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    return problems


def share_of_guided(executions: int, names: list[str]) -> int:
    """Return the executions of each target: at least the initial corpus, which always runs."""
    return max(2 * FIRST_FILES, -(-executions // len(names)))


def why_not_guided() -> str | None:
    """Return why atheris cannot run here, or None."""
    return None if importlib.util.find_spec("atheris") else "needs the package atheris"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--atheris", action="store_true", help="let atheris choose the bytes, guided by coverage")
    chosen, started = parser.parse_args(), time.monotonic()
    with small_sizes():
        if chosen.atheris:
            _main_guided(chosen.executions, chosen.seed, chosen.targets or list(Targets().all))
            return
        found = campaign(chosen.executions, chosen.seed, chosen.targets)
    for (name, end), count in sorted(found.ends.items()):
        print(f"{name}: {count} {end}")
    print(f"the slowest took {found.longest_s:.2f} s;", end=" ")
    print(
        f"{found.measured} measured took {found.most_more_bytes:,} bytes more than {MOST_TIMES} times the file at most"
    )
    leave_with(found.problems, started, chosen.seed)


def _main_guided(executions: int, seed: int, names: list[str]) -> None:
    started = time.monotonic()
    leave_if(why_not_guided())
    if len(names) == 1:
        with_atheris(executions, seed, names[0])
        return
    problems = guided(executions, seed, names)
    print(f"{share_of_guided(executions, names) * len(names)} executions over {len(names)} targets")
    leave_with(problems, started, seed)


if __name__ == "__main__":
    main()
