"""Runs to test with: a small state, saved steps, damage to their files, and processes that own a directory."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt_train.manager import StepManager
from jaxckpt_train.run.entry import Entry, entry_from_manifest, step_name
from jaxckpt_train.run.history import HISTORY_NAME
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.run.record import RECORD_NAME
from tests.conftest import REPO_ROOT
from tests.support.bucket_paths import BucketPath
from tests.support.warm_python import WarmProcess

START = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


class Clock:
    """A wall clock that advances a minute at each call."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime.datetime:
        self.now += datetime.timedelta(minutes=1)
        return self.now


class Counter:
    """A data iterator: 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position - 1

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def record_file(run: Path) -> Path:
    """The file with the newest version of the record of a run."""
    return max((run / RECORD_NAME).iterdir())


def entry_of(step: int) -> Entry:
    """An entry of a step as the manifest of a first save gives it."""
    return entry_from_manifest(step_name(step), step, 0, {"created": START.isoformat(), "sequence": step})


def state_of(step: int) -> dict[str, Any]:
    """Return a state whose bytes depend on the step, with a leaf of more than one page."""
    return {"w": jnp.arange(3000, dtype=jnp.float32) + step, "step": jnp.int32(step)}


def save_steps(manager: StepManager, *steps: int, **more: Any) -> None:
    """Save and commit steps in order."""
    for step in steps:
        manager.save(step, {"state": state_of(step)}, **more)
        manager.wait()


def made_run(directory: Path, *steps: int, **options: Any) -> Path:
    """Make a run directory with these steps and no owner."""
    with StepManager(directory, **options) as manager:
        save_steps(manager, *steps)
    return directory


def step_of(restored: dict[str, Any]) -> int:
    """Return the step of a restored state; check all of its bytes."""
    state = restored["state"]
    step = int(state["step"])
    np.testing.assert_array_equal(np.asarray(state["w"]), np.arange(3000, dtype=np.float32) + step)
    return step


def step_path(directory: Path, step: int) -> Path:
    """The folder of a step; on an object store, of its newest save."""
    name = f"step-{step:010d}"
    saves = directory.glob(f"{name}.*/COMMIT") if isinstance(directory, BucketPath) else ()
    return max(saves, key=lambda path: path.stat().st_mtime, default=directory / name / "COMMIT").parent


def number_of(path: str | os.PathLike[str]) -> int:
    """The number of the step in whose folder a path is."""
    return int(re.findall(r"/step-(\d{10})", os.fspath(path))[-1])


def folder_of(checkpoint: Path) -> Path:
    """The folder with the files of a single checkpoint; on an object store, the one that COMMIT names."""
    if isinstance(checkpoint, BucketPath):
        return checkpoint / json.loads((checkpoint / "COMMIT").read_bytes())["folder"]
    return checkpoint


def remove_tree(folder: Path) -> None:
    """Remove a folder, or the objects below a prefix."""
    if isinstance(folder, BucketPath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder)


def segment_of(step: Path) -> Path:
    return step / "state" / "p00000-s000.safetensors"


def flip_a_payload_byte(step: Path) -> None:
    data = bytearray(segment_of(step).read_bytes())
    data[-100] ^= 1
    segment_of(step).write_bytes(data)


def truncate(file: Path, nbytes: int) -> None:
    """Keep only the first bytes of a file."""
    file.write_bytes(file.read_bytes()[:nbytes])


def truncate_the_segment(step: Path) -> None:
    truncate(segment_of(step), segment_of(step).stat().st_size - 5000)


def remove_the_segment(step: Path) -> None:
    segment_of(step).unlink()


def remove_the_manifest(step: Path) -> None:
    (step / "manifest.json").unlink()


def truncate_the_manifest(step: Path) -> None:
    truncate(step / "manifest.json", 100)


def truncate_commit(step: Path) -> None:
    truncate(step / "COMMIT", 20)


def empty_commit(step: Path) -> None:
    truncate(step / "COMMIT", 0)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped payload byte": (flip_a_payload_byte, "p00000-s000.safetensors"),
    "a truncated segment": (truncate_the_segment, "p00000-s000.safetensors"),
    "a missing segment": (remove_the_segment, "p00000-s000.safetensors"),
    "a missing manifest": (remove_the_manifest, "manifest.json"),
    "a truncated manifest": (truncate_the_manifest, "manifest.json"),
    "a truncated COMMIT": (truncate_commit, "COMMIT"),
    "an empty COMMIT": (empty_commit, "COMMIT"),
}
damaged = pytest.mark.parametrize(("damage", "file"), list(DAMAGE.values()), ids=list(DAMAGE))


def files_below(directory: Path) -> dict[str, bytes]:
    """Return every file with its bytes, except the lock and the history; on an object store, also without the record.

    A new owner replaces the record there.
    """
    own = {LOCK_NAME, "history"}
    files = {HISTORY_NAME, f"{LOCK_NAME}.json", f"{RECORD_NAME}.json"}
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.parent.name not in own and path.name not in files
    }


class Talker:
    """A Python process that exchanges lines with the test; `fresh` as for `run_python`."""

    def __init__(self, script: str, *arguments: str | os.PathLike[str], fresh: bool = False) -> None:
        variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_NUM_CPU_DEVICES": "1"}
        command = ["-u", "-c", script, *map(os.fspath, arguments)]
        self.process: WarmProcess | subprocess.Popen[str]
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
            )
        else:
            self.process = WarmProcess(command, variables, stderr=2)

    def read(self) -> str:
        """Return the next line; fail at the end of the output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()} instead of printing a line"
        return line.strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[int, str]:
        """Close its input, wait for its end, and return the exit code and the rest of its output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with self.process.stdout as lines:
            output = lines.read()
        return self.process.wait(120), output

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def talking_to(script: str, *arguments: str | os.PathLike[str], fresh: bool = False) -> Iterator[Talker]:
    """Start a process, and kill it afterwards."""
    talker = Talker(script, *arguments, fresh=fresh)
    try:
        yield talker
    finally:
        talker.kill()
        for pipe in (talker.process.stdin, talker.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def becomes_newer(step: Path) -> None:
    """Rewrite the step as a later version of this package would write it."""
    manifest = (step / "manifest.json").read_bytes().replace(b'"format_version":1', b'"format_version":9')
    (step / "manifest.json").write_bytes(manifest)
    commit = json.loads((step / "COMMIT").read_bytes())
    commit |= {"format_version": 9, "manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    (step / "COMMIT").write_text(json.dumps(commit, separators=(",", ":")))
