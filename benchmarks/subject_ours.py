"""The subjects `ours...`: jaxckpt_train with its defaults (full durability, digests made and checked), or not quite."""

from __future__ import annotations

import dataclasses
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


class OursOverDevices(Ours):
    """As between machines: each stored byte is read by one process, and goes over the devices to those that need it."""

    def __init__(self) -> None:
        import jax

        from jaxckpt_train.distributed import shared_memory as neighbours

        neighbours.machine_id = lambda: f"machine {jax.process_index()}"
        super().__init__(read_once=True)


class OursReadEach(Ours):
    """`read_once=False`: in a job, each process reads what it needs."""

    def __init__(self) -> None:
        super().__init__(read_once=False)


def why_no_variant(setting: str, *alike: Any) -> str | None:
    """Why a subject with this setting has no turn, of whose values these do the same; None: it differs from `ours`."""
    import jaxckpt_train

    defaults = {field.name: field.default for field in dataclasses.fields(jaxckpt_train.StoreSettings)}
    if setting not in defaults:
        return f"this version has no setting {setting}"
    return "is what ours does by default" if defaults[setting] in alike else None
