"""The handler of Grain's iterators: their position, with what must fit for it to mean the same."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

from jaxckpt_train.checkpointables.contract import Saved, Staged


def mark_absl_flags_parsed() -> None:
    """Mark absl's flags as parsed: Grain's workers read them, and an app that is not absl's never parses them."""
    flags: Any = sys.modules.get("absl.flags")
    if flags is not None and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


@contextlib.contextmanager
def with_fingerprint(fingerprint: str | None) -> Iterator[None]:
    """Save and check this fingerprint meanwhile."""
    yield


class GrainHandler:
    """A Grain iterator."""

    kind = "grain"
    early = True

    def handles(self, value: object) -> bool:
        """Whether it is one."""
        return type(value).__module__.startswith("grain.") and hasattr(value, "get_state")

    def stage(self, value: Any) -> Staged:
        """Its state."""
        state = value.get_state()
        return Staged(
            value={
                "state": json.loads(state) if isinstance(state, bytes) else copy.deepcopy(state),
                "bytes": isinstance(state, bytes),
            }
        )

    def restore(self, target: Any, saved: Saved) -> Any:
        """The target at the saved position."""
        value = saved.value()
        if target is None:
            return value["state"]
        target.set_state(json.dumps(value["state"], indent=4).encode() if value["bytes"] else value["state"])
        return target
