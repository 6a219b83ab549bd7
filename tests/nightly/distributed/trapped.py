"""A process that gets a signal at a chosen moment of a save or a restore: the programs of the campaign's processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax

import jaxckpt_train as jct
from jaxckpt_train.distributed.jax_service import JaxKeyValues
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.jobs.arrays import are_equal, global_array

LIMIT_S = 6.0


class Trap:
    """Counts moments; at one of them, writes the time to a file and sends this process a signal."""

    def __init__(self) -> None:
        self.count, self._at, self._signal, self._note = 0, 0, 0, Path()
        self._lock = threading.Lock()

    def arm(self, at: int, number: int, note: Path) -> None:
        self.count, self._at, self._signal, self._note = 0, at, number, note

    def moment(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._at:
                self._note.write_text(repr(time.time()))
                os.kill(os.getpid(), self._signal)

    def around(self, thing: Any) -> Any:
        """Wrap an object so that each call of it, and of the files that it opens, is a moment."""
        return _Watched(thing, self)


class _Watched:
    def __init__(self, thing: Any, trap: Trap) -> None:
        self._thing, self._trap = thing, trap

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._trap.moment()
            result = found(*arguments, **options)
            return _Watched(result, self._trap) if name in ("create", "open") else result

        return call


_trap = Trap()


def state_of(step: int) -> dict[str, Any]:
    """A sharded and a replicated matrix, both large enough for several writers, and a small array."""
    count = jax.device_count()
    split, whole = global_array([1024, 1024], [count], ["x"]), global_array([1024, 1024], [count], [])
    return {"split": split + step, "whole": whole * (step + 1), "small": global_array([3], [count], []) + step}


def is_state(state: dict[str, Any], step: int) -> bool:
    return are_equal(state, state_of(step))


_manager: list[jct.StepManager] = []


def go_on(directory: str, first: bool) -> int:
    """Take the directory, restore the newest step, compare it byte for byte, and save one more."""
    asked = JaxKeyValues._call
    if not _manager:
        JaxKeyValues._call = lambda self, *given: (_trap.moment(), asked(self, *given))[1]  # type: ignore[method-assign]
    settings = jct.StoreSettings(barrier_timeout_s=LIMIT_S)
    manager = jct.StepManager(directory, settings=settings, backend=_trap.around(LocalBackend()))
    _manager.append(manager)
    manager.own()
    step = 0
    if not first:
        restored = manager.restore({"state": state_of(0)})
        step = manager.restored_step or 0
        assert is_state(restored["state"], step), f"step {step} is another"
    manager.save(step + 1, {"state": state_of(step + 1)})
    manager.wait()
    return step + 1


def act(what: str, step: int) -> int:
    """Do the save or the restore, and return how many moments it had."""
    _trap.arm(0, 0, Path())
    if what == "restore":
        restored = _manager[0].restore({"state": state_of(0)})
        assert is_state(restored["state"], step)
    else:
        _manager[0].save(step, {"state": state_of(step)})
        _manager[0].wait()
    return _trap.count


def act_and_be_stopped(what: str, step: int, victim: int, at: int, number: int, note: str) -> dict[str, Any]:
    """Do it again, and send the victim its signal; return when and how it ended in this process."""
    state = state_of(step)
    _trap.arm(at if jax.process_index() == victim else 0, number, Path(note))
    try:
        if what == "restore":
            _manager[0].restore({"state": state})
        else:
            _manager[0].save(step, {"state": state})
            _manager[0].wait()
    except jct.CheckpointError as error:
        return {"at": time.time(), "error": f"{type(error).__name__}: {error}"}
    return {"at": time.time(), "error": None}
