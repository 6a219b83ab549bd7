"""The subjects: checkpoint libraries with their default settings, as a training loop calls them; and the control."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.subject_ours import Ours
from benchmarks.subjects_orbax import OrbaxV0, OrbaxV1

Tree = Any
Wait = Callable[[], object]

CONTROL_SAVE_S = 1.0


class Subject(Protocol):
    """A library under measurement."""

    def start_save(self, path: Path, tree: Tree) -> Wait:
        """Begin to save to the new directory `path`; the returned function waits until the save is finished."""

    def load(self, path: Path, like: Tree) -> Tree:
        """Load what lies at `path` into arrays as `like` describes them."""


class Nothing:
    """The control: a save that takes `save_s` and does nothing. What it costs is the noise of the measurement."""

    def __init__(self, save_s: float) -> None:
        self._save_s = save_s

    def start_save(self, path: Path, tree: Tree) -> Wait:
        until = time.perf_counter() + self._save_s
        return lambda: time.sleep(max(0.0, until - time.perf_counter()))

    def load(self, path: Path, like: Tree) -> Tree:
        raise NotImplementedError("nothing was saved")


NOTHING, OURS, ORBAX_V0, ORBAX_V1 = "nothing", "ours", "orbax_v0", "orbax_v1"
OURS_HOST, OURS_DEVICE, OURS_STREAM = "ours_host", "ours_device", "ours_stream"
LIBRARIES = (OURS, ORBAX_V0, ORBAX_V1)


def make_subject(name: str, read_budget_bytes: int | None = None) -> Subject:
    """The subject with this name. Only the libraries that it needs are imported."""
    match name:
        case "nothing":
            return Nothing(CONTROL_SAVE_S)
        case "ours":
            return Ours() if read_budget_bytes is None else Ours(read_budget_bytes=read_budget_bytes)
        case "ours_host":
            return Ours(snapshot="host")
        case "ours_device":
            return Ours(snapshot="device")
        case "ours_stream":
            return Ours(snapshot="stream")
        case "orbax_v0":
            return OrbaxV0()
        case "orbax_v1":
            return OrbaxV1()
    raise ValueError(f"no subject {name!r}")
