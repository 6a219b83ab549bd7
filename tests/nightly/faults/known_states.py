"""A small state that tells by all its bytes which save it is of.

A save is known by a number, its token: the step, and how many roll-backs or replacements there were before. So a later
save has a higher one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxckpt_train.checkpointables.handlers import JsonValue
from jaxckpt_train.settings import StoreSettings

KEPT, SIZE = 2, 40_000
SETTINGS = StoreSettings(io_threads=1, staging_bytes=16 << 20)
_STEPS = 1000


def token_of(step: int, generation: int) -> int:
    """The token of a save."""
    return generation * _STEPS + step


def step_in(token: int) -> int:
    """The step that a save is of."""
    return token % _STEPS


def state_of(token: int) -> dict[str, Any]:
    """Some 320 kB of arrays."""
    chance = np.random.default_rng(token)
    return {"w": chance.standard_normal(SIZE), "small": {f"x{n}": chance.integers(0, 99, 7) for n in range(5)}}


def checkpointables_of(token: int) -> dict[str, Any]:
    """What is saved: arrays and a position in the data."""
    return {"state": state_of(token), "data": JsonValue({"position": token})}


def token_in(restored: dict[str, Any]) -> int:
    """Which save it is of, all of it.

    Raises:
        AssertionError: it is a mixture.
    """
    token = int(restored["data"].value["position"])
    expected, state = state_of(token), restored["state"]
    assert state["w"].tobytes() == expected["w"].tobytes(), f"w is not that of save {token}"
    for name, array in expected["small"].items():
        assert state["small"][name].tobytes() == array.tobytes(), f"{name} is not that of save {token}"
    return token
