"""The subjects `orbax_v0` and `orbax_v1`: Orbax's two interfaces with their default options.

A finished save of either has synced the array data and the directories that hold it (TensorStore does that), but not
the metadata files, nor the rename to the final name (traced with Orbax 0.12.8). So `durable` is False here.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.subject import Wait
from benchmarks.workloads import Tree


class OrbaxV0:
    """`StandardCheckpointer`, whose `save` is asynchronous."""

    name = "orbax_v0"
    durable = False

    def __init__(self) -> None:
        import orbax.checkpoint

        self._checkpointer = orbax.checkpoint.StandardCheckpointer()

    def start_save(self, path: Path, tree: Tree) -> Wait:
        self._checkpointer.save(path, tree)
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, like: Tree) -> Tree:
        return self._checkpointer.restore(path, like)

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxV1:
    """The free functions `save_async` and `load` of `orbax.checkpoint.experimental.v1`."""

    name = "orbax_v1"
    durable = False

    def __init__(self) -> None:
        import orbax.checkpoint.experimental.v1 as orbax_v1

        self._save_async = orbax_v1.save_async
        self._load = orbax_v1.load

    def start_save(self, path: Path, tree: Tree) -> Wait:
        response = self._save_async(path, tree)

        def wait() -> None:
            response.result()

        return wait

    def load(self, path: Path, like: Tree) -> Tree:
        return self._load(path, like)

    def close(self) -> None:
        """The free functions keep nothing."""
