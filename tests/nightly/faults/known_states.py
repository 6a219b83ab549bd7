"""A small state whose bytes all identify its save.

A save is identified by a token: its step, and the number of roll-backs or replacements before it. A later save has a
higher token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxckpt_train.checkpointables.base import JsonValue
from jaxckpt_train.settings import StoreSettings

KEPT, SIZE = 2, 40_000
SETTINGS = StoreSettings(io_threads=1, staging_bytes=16 << 20)
_STEPS = 1000


def token_of(step: int, generation: int) -> int:
    """Return the token of a save."""
    return generation * _STEPS + step


def step_in(token: int) -> int:
    """Return the step of a save."""
    return token % _STEPS


def state_of(token: int) -> dict[str, Any]:
    """Return about 320 kB of arrays."""
    chance = np.random.default_rng(token)
    return {"w": chance.standard_normal(SIZE), "small": {f"x{n}": chance.integers(0, 99, 7) for n in range(5)}}


def checkpointables_of(token: int) -> dict[str, Any]:
    """Return the content of a save: arrays and a position in the data."""
    return {"state": state_of(token), "data": JsonValue({"position": token})}


def token_in(restored: dict[str, Any]) -> int:
    """Return the token of the save that has all of this content.

    Raises:
        AssertionError: it mixes several saves.
    """
    token = int(restored["data"].value["position"])
    expected, state = state_of(token), restored["state"]
    assert state["w"].tobytes() == expected["w"].tobytes(), f"w is not that of save {token}"
    for name, array in expected["small"].items():
        assert state["small"][name].tobytes() == array.tobytes(), f"{name} is not that of save {token}"
    return token
