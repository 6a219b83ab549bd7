"""The subjects: checkpoint libraries with their default settings, as a training loop calls them; and the control."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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


class Ours:
    """`jaxckpt_train.save_async` and `load`; None means the default."""

    def __init__(self, read_budget_bytes: int | None = None, snapshot: str | None = None) -> None:
        import jaxckpt_train

        self._library = jaxckpt_train
        given = {"read_budget_bytes": read_budget_bytes, "snapshot": snapshot}
        self._settings = jaxckpt_train.StoreSettings(
            **{name: value for name, value in given.items() if value is not None}
        )

    def start_save(self, path: Path, tree: Tree) -> Wait:
        return self._library.save_async(path, tree, settings=self._settings).wait

    def load(self, path: Path, like: Tree) -> Tree:
        return self._library.load(path, like, settings=self._settings)


class OrbaxV0:
    """`StandardCheckpointer`, whose `save` is asynchronous."""

    def __init__(self) -> None:
        import orbax.checkpoint

        self._checkpointer = orbax.checkpoint.StandardCheckpointer()

    def start_save(self, path: Path, tree: Tree) -> Wait:
        self._checkpointer.save(path, tree)
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, like: Tree) -> Tree:
        return self._checkpointer.restore(path, like)


class OrbaxV1:
    """The free functions `save_async` and `load` of `orbax.checkpoint.experimental.v1`."""

    def __init__(self) -> None:
        import orbax.checkpoint.experimental.v1 as orbax_v1

        self._library = orbax_v1

    def start_save(self, path: Path, tree: Tree) -> Wait:
        return self._library.save_async(path, tree).result

    def load(self, path: Path, like: Tree) -> Tree:
        return self._library.load(path, like)


NOTHING, OURS, OURS_HOST, ORBAX_V0, ORBAX_V1 = "nothing", "ours", "ours_host", "orbax_v0", "orbax_v1"
LIBRARIES = (OURS, ORBAX_V0, ORBAX_V1)


def make_subject(name: str, read_budget_bytes: int | None = None) -> Subject:
    """The subject with this name. Only the libraries that it needs are imported."""
    match name:
        case "nothing":
            return Nothing(CONTROL_SAVE_S)
        case "ours":
            return Ours(read_budget_bytes)
        case "ours_host":
            return Ours(snapshot="host")
        case "orbax_v0":
            return OrbaxV0()
        case "orbax_v1":
            return OrbaxV1()
    raise ValueError(f"no subject {name!r}")
