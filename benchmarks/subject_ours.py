"""The subject `ours`: jaxckpt_train with its default settings (full durability, digests made and checked)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from benchmarks.arrays import State
from benchmarks.subject import Wait

SAVE_TIMEOUT_S = 600.0


class Ours:
    """`jaxckpt_train.save_async` and `jaxckpt_train.load`; a part is loaded with `only=` and a target of that part."""

    arrays = "jax"
    durable = True
    packages = ("jaxckpt-train", "jax", "jaxlib", "numpy")

    def __init__(self, **settings: Any) -> None:
        """`settings`: of the `StoreSettings`; what is not given is the default."""
        import jaxckpt_train

        chosen = jaxckpt_train.StoreSettings(**settings)
        self._save_async = functools.partial(jaxckpt_train.save_async, settings=chosen)
        self._load = functools.partial(jaxckpt_train.load, settings=chosen)

    def start_save(self, path: Path, state: State) -> Wait:
        pending = self._save_async(path, state)

        def wait() -> None:
            pending.wait(SAVE_TIMEOUT_S)

        return wait

    def load(self, path: Path, like: State) -> State:
        only = "params/**" if like.keys() == {"params"} else None
        return self._load(path, like, only=only)

    def close(self) -> None:
        """Nothing is kept between rounds that needs closing."""
