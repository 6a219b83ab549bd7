"""What all campaigns of `faults.py` have in common: the subjects, a small state, what a load comes to, a row of it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.subject import Subject
from benchmarks.subject_ours import Ours
from benchmarks.subjects_orbax import OrbaxV0, OrbaxV0WithoutOcdbt, OrbaxV1, OrbaxV1WithoutOcdbt

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "ours": Ours,
    "orbax_v1": OrbaxV1,
    "orbax_v1_no_ocdbt": OrbaxV1WithoutOcdbt,
    "orbax_v0": OrbaxV0,
    "orbax_v0_no_ocdbt": OrbaxV0WithoutOcdbt,
}
LONGEST_S = 300


@dataclasses.dataclass
class Row:
    """One subject in one campaign: how often what happened."""

    campaign: str
    subject: str
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, end: str, detail: str = "") -> None:
        """One trial."""
        self.ends[end] += 1
        self.first.setdefault(end, detail)


def state_of(step: int) -> dict[str, Any]:
    """Some 200 kB of arrays, as bytes by which the step is known."""
    import jax

    chance = np.random.default_rng(step)
    tree = {"w": chance.standard_normal((200, 128)), "small": {f"x{n}": chance.integers(0, 99, 7) for n in range(9)}}
    return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(np.float32), tree))


def abstract(state: Any) -> Any:
    """The target of a load."""
    import jax

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def is_same(found: Any, expected: Any) -> bool:
    """Byte for byte."""
    import jax

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def save(subject: Subject, path: Path, state: Any) -> None:
    """A save, acknowledged when this returns."""
    wait = subject.start_save(path, state)
    if wait is not None:
        wait()


def outcome(subject: Subject, path: Path, step: int) -> tuple[str, str]:
    """What a load of a step comes to."""
    expected = state_of(step)
    try:
        found = subject.load(path, abstract(expected))
    except Exception as error:  # noqa: BLE001  # whatever the subject raises is what is counted
        return "error", f"{type(error).__name__}: {error}"[:200]
    return ("right", "") if is_same(found, expected) else ("silently wrong", "")
