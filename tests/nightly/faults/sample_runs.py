"""Runs in memory for damage campaigns: their states, creation and comparison."""

from __future__ import annotations

import contextlib
import functools
import random
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxckpt_train.checkpointables.base import JsonValue
from jaxckpt_train.manager import StepManager
from jaxckpt_train.settings import DigestName, StoreSettings
from tests.nightly.faults.damages import Files
from tests.support.memory_backend import MemoryBackend
from tests.support.runs import Clock

RUN = "/run"
OLD, NEW = "step-0000000001", "step-0000000002"
DIGESTS: tuple[DigestName, ...] = ("xxh3-128", "sha256", "blake3")


def state_of(step: int) -> dict[str, Any]:
    """Return a state with arrays of many kinds in several segments, and a value."""
    chance = np.random.default_rng(step)
    return {
        "state": {
            "large": chance.standard_normal((32, 128)).astype(np.float32),
            "twin": chance.standard_normal((32, 128)).astype(np.float32),  # in a segment of the same size
            "half": chance.standard_normal(700).astype(ml_dtypes.bfloat16),
            "bytes": chance.integers(0, 256, 5001, np.uint8),
            "one": np.float64(chance.standard_normal()),
            "none": np.zeros((0, 3), np.int16),
            "small": {f"x{n}": chance.integers(0, 9, 5) for n in range(20)},
        },
        "config": JsonValue({"step": step, "text": "x" * 100}),
    }


def raw(found: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the loaded leaves as bytes, by name."""
    state = found["state"]
    leaves = {
        **{k: v for k, v in state.items() if k != "small"},
        **{f"small/{k}": v for k, v in state["small"].items()},
    }
    return {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items()} | {
        "config": repr(found["config"]).encode()
    }


@functools.cache
def expected(step: int) -> dict[str, bytes]:
    """Return the expected result of a load of this step."""
    return raw(state_of(step))


@contextlib.contextmanager
def same_ids() -> Iterator[None]:
    """Make generated ids reproducible, so that a trial always damages the same bytes."""
    chance = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128)))
        yield


def saving(digest: DigestName, backend: MemoryBackend) -> StepManager:
    """Return an owner that saves small segments on one thread, with a reproducible clock."""
    settings = StoreSettings(digest=digest, segment_bytes=8192, staging_bytes=1 << 16, io_threads=1)
    return StepManager(RUN, settings=settings, backend=backend, clock=Clock())


def made(digest: DigestName, steps: int = 2) -> Files:
    """Return the files of a run with `steps` steps."""
    backend = MemoryBackend()
    with same_ids(), saving(digest, backend) as manager:
        for step in range(1, 1 + steps):
            manager.save(step, state_of(step))
            manager.wait()
    return files_below(backend, RUN)


def files_below(backend: MemoryBackend, directory: str) -> Files:
    """Return the current files below a directory."""
    nodes = backend._nodes.items()
    return {path: bytes(node.data) for path, node in nodes if node is not None and path.startswith(f"{directory}/")}


def planted(files: Files, into: MemoryBackend | None = None) -> MemoryBackend:
    """Return a backend that holds these files."""
    backend = into or MemoryBackend()
    for path, data in files.items():
        backend.make_directory(path.rpartition("/")[0], parents=True, sync=False)
        backend.append(path, data)
    return backend
