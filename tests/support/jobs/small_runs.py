"""Small runs of two processes, and results of calls as text, for functions that the processes of jobs call."""

from __future__ import annotations

from typing import Any

import jax

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array

QUICK = jct.StoreSettings(barrier_timeout_s=5.0)
SAVED, RESTORED = "'saved'", "'restored'"


def state_of(step: int) -> dict[str, Any]:
    return {"w": global_array([64, 16], [2], ["x"]) + step}


def is_first() -> bool:
    return jax.process_index() == 0


def outcome(call: Any) -> str:
    try:
        return repr(call())
    except BaseException as error:  # noqa: BLE001  # the error goes to the test
        return f"{type(error).__name__}: {error}"


def save(manager: jct.StepManager, step: int, **more: Any) -> str:
    def begin() -> str:
        result = manager.save(step, {"state": state_of(step)}, **more)
        return "saved" if result.saved else result.reason

    return outcome(begin)


def save_steps(directory: str, steps: list[int]) -> None:
    with jct.StepManager(directory) as manager:
        for step in steps:
            manager.save(step, {"state": state_of(step)})
