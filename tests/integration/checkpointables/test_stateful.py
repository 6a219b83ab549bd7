"""Objects that write and read their own files by Orbax's StatefulCheckpointable protocol."""

from __future__ import annotations

from typing import Any


def test_orbax_accepts_stateful_object(run_python: Any) -> None:
    script = """
from orbax.checkpoint import v1 as ocp
from tests.unit.checkpointables.test_stateful import Tokenizer
from jaxckpt_train.checkpointables.handlers import handler_of
assert isinstance(Tokenizer({}), ocp.StatefulCheckpointable)
print(handler_of(Tokenizer({})).kind)
"""
    assert run_python(script, check=True).stdout == "stateful\n"
