"""Feeds files that somebody else made to all that reads them: `python -m tests.faults.hostile --executions 20000000`.

Each target gets bytes in place of one file, and may only raise our errors. The bytes are sound files that were changed,
as JSON or as bytes, by chance from a seed; `--atheris` lets atheris choose them instead, guided by what they reach.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import hashlib
import importlib.util
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import msgspec
import numpy as np
import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.checkpointables.iterator_state import encode_state
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.catalog import scan
from jaxckpt_train.steps.history import HISTORY_NAME, History
from jaxckpt_train.steps.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.steps.notes import NOTES_NAME
from jaxckpt_train.store.digests import block_digests, digest_function
from jaxckpt_train.store.manifest import COMMIT_NAME, FORMAT, FORMAT_VERSION, MANIFEST_NAME, decode_manifest
from jaxckpt_train.store.memory import MemoryBackend
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.store.segment import LENGTH_BYTES, decode_header
from jaxckpt_train.store.transaction import CommitRecord, open_committed
from jaxckpt_train.store.verify import verify
from tests.crash.explorer import small_sizes
from tests.faults.corruption import NEW, RUN, Files, made, planted

STEP = f"{RUN}/{NEW}"
A_STATE = {"params": {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": 3}, "step": np.int32(7), "none": None}
AN_ITERATOR = {
    "grain_version": "0", "iterator": "MapDatasetIterator", "workers": None, "processes": 1, "process": 0,
    "fingerprint": None,
    "state": encode_state(
        {"numpy": [np.float32(0.5), np.arange(3)], "tuple": (b"x", 2**70), "float": math.inf, 5: np.datetime64(1, "s")}
    ),
}  # fmt: skip
SLOW = {"load", "metadata", "steps", "verify", "Flax file", "value", "iterator"}
SETTINGS = StoreSettings(io_threads=1)
LONGEST_S = 1.0
TRIES = 3
WORDS: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, "", ".", "..", "/", "../../etc/passwd",
    "/etc/passwd", "a/b", "a\0b", "CON", "manifest.json", "COMMIT", "\ud800", "é", "x" * 300, [], {}, [[]], [0], [-1],
    [2**40, 2**40], {"a": 1}, "float32", "bool", "int4", "object", "O", "<f4", "xxh3-128", "sha256", "md5", "0" * 32,
    "F32", "BF16", "(1,,)i4", "~fzz", "~f0x1p99999", "~t~t", "9" * 5000, 10**400, [2**61, 0],
]  # fmt: skip


def replaced(files: Files, path: str, data: bytes) -> MemoryBackend:
    """A back end whose file is another one."""
    return planted({**files, path: data})


def with_manifest(files: Files, data: bytes) -> MemoryBackend:
    """A back end whose manifest is another one, for which COMMIT stands as it should."""
    commit = CommitRecord(FORMAT, FORMAT_VERSION, len(data), hashlib.sha256(data).hexdigest())
    changed = {**files, f"{STEP}/{MANIFEST_NAME}": data, f"{STEP}/{COMMIT_NAME}": msgspec.json.encode(commit)}
    return planted(changed)


def a_lock() -> bytes:
    """The lock of an owner."""
    backend = MemoryBackend()
    backend.make_directory(RUN, parents=True, sync=False)
    lock = OwnerLock(backend, RUN)
    lock.acquire()
    try:
        return read_whole(backend, RUN, LOCK_NAME, limit=1 << 16).tobytes()
    finally:
        lock.release()


class Targets:
    """All that reads files, each with a sound file to begin with."""

    def __init__(self) -> None:
        self.files = made("xxh3-128")
        self.files[f"{RUN}/{NOTES_NAME}"] = (
            json.dumps(
                {"step": 2, "name": NEW, "saved": "2026-01-01T00:00:00+00:00", "pin": True, "metrics": {"a": 1.0}}
            ).encode()
            + b"\n"
        )
        self.files[f"{RUN}/{LOCK_NAME}"] = a_lock()
        segment = next(data for path, data in self.files.items() if path.startswith(STEP) and path.endswith("tensors"))
        self.size = len(segment)
        head = segment[: LENGTH_BYTES + int.from_bytes(segment[:LENGTH_BYTES], "little")]
        manifest = self.files[f"{STEP}/{MANIFEST_NAME}"]
        self.all: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
            "segment header": (head, lambda data: decode_header(data, self.size, "x")),
            "manifest": (manifest, lambda data: decode_manifest(data, "x")),
            "load": (manifest, self.load),
            "metadata": (manifest, self.metadata),
            "steps": (manifest, lambda data: scan(with_manifest(self.files, data), RUN)),
            "verify": (manifest, lambda data: verify(with_manifest(self.files, data), STEP, SETTINGS)),
            "COMMIT": (self.files[f"{STEP}/{COMMIT_NAME}"], self.open),
            "history": (self.files[f"{RUN}/{HISTORY_NAME}"], self.history),
            "notes": (self.files[f"{RUN}/{NOTES_NAME}"], self.notes),
            "value": (self.files[f"{STEP}/config/p00000.json"], self.value),
            "iterator": (msgspec.json.encode(AN_ITERATOR), lambda data: self.value(data, kind="grain")),
            "Flax file": (flax.serialization.msgpack_serialize(A_STATE), self.flax_file),
            "lock": (self.files[f"{RUN}/{LOCK_NAME}"], self.lock),
        }

    def load(self, data: bytes) -> None:
        """A load of the step."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_BACKEND", with_manifest(self.files, data))
            checkpoint.load_checkpointables(STEP, settings=SETTINGS)

    def metadata(self, data: bytes) -> None:
        """All that is told of the step."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_BACKEND", with_manifest(self.files, data))
            repr((checkpoint.metadata(STEP), checkpoint.metadata(STEP).checkpointables))

    def value(self, data: bytes, kind: str = "json") -> None:
        """A load of a value, whose digest stands for what it is."""
        manifest = decode_manifest(self.files[f"{STEP}/{MANIFEST_NAME}"], "x")
        text = msgspec.json.encode(manifest)
        digests = block_digests(np.frombuffer(data, np.uint8), manifest.block_bytes, digest_function(manifest.digest))
        (part,) = (part for part in manifest.parts if part.files)
        old = part.files[0]
        text = text.replace(msgspec.json.encode(old), msgspec.json.encode((old.file, len(data), digests)))
        text = text.replace(b'"kind":"json"', f'"kind":"{kind}"'.encode())
        backend = with_manifest({**self.files, f"{STEP}/{old.file}": data}, text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_BACKEND", backend)
            checkpoint.load_checkpointables(STEP, {"config": None}, settings=SETTINGS)

    def flax_file(self, data: bytes) -> None:
        """A file of Flax's own, read as ours."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_BACKEND", planted({"/file/state": data}))
            patch.setattr(checkpoint, "is_file", lambda path: True)
            checkpoint.load("/file/state", settings=SETTINGS)

    def open(self, data: bytes) -> None:
        """What a load looks at first."""
        open_committed(replaced(self.files, f"{STEP}/{COMMIT_NAME}", data), STEP)

    def history(self, data: bytes) -> None:
        """The history of a run."""
        History(replaced(self.files, f"{RUN}/{HISTORY_NAME}", data), RUN).events()

    def notes(self, data: bytes) -> None:
        """The list of steps of a run."""
        scan(replaced(self.files, f"{RUN}/{NOTES_NAME}", data), RUN)

    def lock(self, data: bytes) -> None:
        """Who owns a run."""
        OwnerLock(replaced(self.files, f"{RUN}/{LOCK_NAME}", data), RUN)._read()


@dataclasses.dataclass
class Found:
    """What a campaign came to: executions by target and how they ended, the slowest, and what must not be."""

    ends: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    longest_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


def execute(found: Found, name: str, target: Callable[[bytes], object], data: bytes) -> None:
    """One execution; of one that took long the shortest of a few, since the machine may have been busy."""
    took_s = math.inf
    for _ in range(TRIES):
        started = time.perf_counter()
        try:
            target(data)
            end = "taken"
        except CheckpointError:
            end = "refused"
        except Exception:  # noqa: BLE001  # whatever else there is, is what this looks for
            end = "other"
            found.problems.append(f"{name}: {traceback.format_exc(limit=-3)}\n  of {data[:2000]!r}")
        took_s = min(took_s, time.perf_counter() - started)
        if took_s <= LONGEST_S:
            break
    found.longest_s = max(found.longest_s, took_s)
    found.ends[name, end] += 1
    if took_s > LONGEST_S:
        found.problems.append(f"{name}: took {took_s:.1f} s for {data[:2000]!r}")


def changed(data: bytes, chance: random.Random) -> bytes:
    """As JSON if it is that, line by line or after a length; else, and often anyway, as bytes."""
    if chance.random() < 0.7:
        prefix = LENGTH_BYTES if data[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and data[:1] != b"{" else 0
        try:
            tree = json.loads(data[prefix:])
        except ValueError:
            lines = data.splitlines(keepends=True)
            at = chance.randrange(len(lines)) if lines else 0
            return b"".join([*lines[:at], changed(lines[at], chance), *lines[at + 1 :]]) if len(lines) > 1 else b"{}"
        for _ in range(chance.randint(1, 3)):
            tree = _changed_tree(tree, chance)
        text = json.dumps(tree, separators=(",", ":")).encode()
        if not prefix:
            return text
        text = text.ljust(-(-(len(text) + prefix) // 4096) * 4096 - prefix)
        return len(text).to_bytes(prefix, "little") + text
    return _changed_bytes(bytearray(data), chance)


def _changed_tree(node: Any, chance: random.Random) -> Any:
    if isinstance(node, dict) and node and chance.random() < 0.9:
        key = chance.choice(list(node))
        match chance.randrange(12):
            case 0:
                return {each: value for each, value in node.items() if each != key}
            case 1:
                return {**node, str(chance.choice(WORDS)): chance.choice(WORDS)}
            case _:
                return {**node, key: _changed_tree(node[key], chance)}
    if isinstance(node, list) and node and chance.random() < 0.9:
        at = chance.randrange(len(node))
        match chance.randrange(12):
            case 0:
                return [*node[:at], *node[at + 1 :]]
            case 1:
                return [*node, node[at]]
            case 2:
                return [*node, *node * chance.randint(1, 50)]
            case _:
                return [*node[:at], _changed_tree(node[at], chance), *node[at + 1 :]]
    if isinstance(node, int) and chance.random() < 0.6:
        return node + chance.choice((-1, 1, 64, 4096, -4096, 1 << 31, 1 << 62))
    if isinstance(node, str) and node and chance.random() < 0.5:
        at = chance.randrange(len(node))
        return node[:at] + chance.choice(("", "0", "/", "..", "\0", "é", node)) + node[at + 1 :]
    return chance.choice(WORDS)


def _changed_bytes(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                del data[at : at + chance.randint(1, 50)]
            case 1:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case 2:
                data[at:at] = data[: chance.randint(1, 200)]
            case 3:
                data[at:at] = chance.choice(
                    (
                        b"[" * 3000,
                        b'{"a":' * 3000,
                        b"\x81\xa1a" * 500,
                        b"9" * 5000,
                        b'"\\ud800"',
                        b"NaN",
                        b"-0",
                        b"1e999",
                    )
                )
            case _:
                if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
    return bytes(data)


def campaign(executions: int, seed: int, names: list[str] | None = None) -> Found:
    """So many executions over all targets; the slow ones at every thirtieth."""
    found, chance, targets = Found(), random.Random(seed), Targets()
    chosen = names or list(targets.all)
    slow = SLOW & set(chosen)
    for number in range(executions):
        name = chance.choice([each for each in chosen if each not in slow or number % 30 == 0] or chosen)
        data, target = targets.all[name]
        execute(found, name, target, changed(data, chance))
        if len(found.problems) > 20:
            break
    return found


def with_atheris(executions: int, seed: int, name: str) -> None:
    """Let atheris choose the bytes; it ends the process at the first thing that must not be."""
    import atheris

    targets, found = Targets(), Found()
    target = targets.all[name][1]

    def one(given: bytes) -> None:
        execute(found, name, target, given)
        if found.problems:
            raise AssertionError(found.problems[0])

    sound, chance = targets.all[name][0], random.Random(0)
    with tempfile.TemporaryDirectory() as folder:  # what it begins with
        for number, first in enumerate([sound, *(changed(sound, chance) for _ in range(200))]):
            (Path(folder) / str(number)).write_bytes(first)
        for each in gc.get_objects():
            if isinstance(each, types.FunctionType) and (each.__module__ or "").startswith("jaxckpt_train."):
                atheris.instrument_func(each)
        options = [f"-runs={executions}", f"-seed={seed + 1}", f"-max_len={4 * len(sound)}", "-rss_limit_mb=8192"]
        atheris.Setup([sys.argv[0], *options, folder], one)
        atheris.Fuzz()


def guided(executions: int, seed: int, names: list[str]) -> list[str]:
    """As `campaign`, with atheris, in a process for each target; the problems."""
    problems = []
    for name in names:
        share = str(-(-executions // len(names)))
        command = [sys.executable, "-m", "tests.faults.hostile", "--atheris", "--targets", name, "--executions", share]
        done = subprocess.run([*command, "--seed", str(seed)], capture_output=True, text=True, check=False)
        if done.returncode != 0 or f"Done {share} runs" not in done.stderr:
            problems.append(f"{name}: ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    return problems


def why_not_guided() -> str | None:
    """Why atheris cannot choose the bytes here; None: it can."""
    return None if importlib.util.find_spec("atheris") else "needs the package atheris"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--atheris", action="store_true", help="let it choose the bytes, led by what they reach")
    chosen, started = parser.parse_args(), time.monotonic()
    with small_sizes():
        if chosen.atheris:
            _main_guided(chosen.executions, chosen.seed, chosen.targets or list(Targets().all))
            return
        found = campaign(chosen.executions, chosen.seed, chosen.targets)
    for (name, end), count in sorted(found.ends.items()):
        print(f"{name}: {count} {end}")
    print(f"the slowest took {found.longest_s:.2f} s")
    print(f"{len(found.problems)} problems; {time.monotonic() - started:.0f} s, seed {chosen.seed}")
    for problem in found.problems:
        print(f"  {problem}")
    raise SystemExit(bool(found.problems))


def _main_guided(executions: int, seed: int, names: list[str]) -> None:
    reason, started = why_not_guided(), time.monotonic()
    if reason is not None:
        print(f"SKIP: {reason}")
        return
    if len(names) == 1:
        with_atheris(executions, seed, names[0])
        return
    problems = guided(executions, seed, names)
    print(f"{executions} executions over {len(names)} targets, {len(problems)} problems;", end=" ")
    print(f"{time.monotonic() - started:.0f} s, seed {seed}", *problems, sep="\n  ")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
