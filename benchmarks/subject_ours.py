"""The subject `ours`: jaxckpt_train with its default settings (full durability, digests made and checked)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.subject import Wait
from benchmarks.workloads import Tree

SAVE_TIMEOUT_S = 600.0


class Ours:
    """`jaxckpt_train.save_async` and `jaxckpt_train.load`."""

    name = "ours"
    durable = True

    def __init__(self) -> None:
        import jaxckpt_train

        self._save_async = jaxckpt_train.save_async
        self._load = jaxckpt_train.load

    def start_save(self, path: Path, tree: Tree) -> Wait:
        pending = self._save_async(path, tree)

        def wait() -> None:
            pending.wait(SAVE_TIMEOUT_S)

        return wait

    def load(self, path: Path, like: Tree) -> Tree:
        return self._load(path, like)

    def close(self) -> None:
        """Nothing is kept between rounds that needs closing."""
