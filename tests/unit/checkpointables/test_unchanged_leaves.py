"""What is remembered of the last save, and when it no longer counts."""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt_train.checkpointables.staging import SaveTimes, StagedPart, stage_all
from jaxckpt_train.checkpointables.unchanged import UnchangedLeaves
from jaxckpt_train.pytree import identity
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.manifest import ArrayRecord, ChunkRecord, SegmentRecord
from jaxckpt_train.store.writer import WrittenArrays

WRITTEN = WrittenArrays(
    (SegmentRecord("state/a", 4108, 4096, "0" * 32),),
    (ArrayRecord("w", (3,), "float32", (ChunkRecord(((0, 3),), 0, 4096, 12, "1" * 32),)),),
)


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "has_own_memory", lambda: True)
    monkeypatch.setattr(identity, "is_host_memory", lambda sharding: False)


def staged(unchanged: UnchangedLeaves, state: Any) -> StagedPart:
    (part,) = stage_all({"state": state}, SaveTimes(), StoreSettings(), None, unchanged.last)
    return part


def commit(unchanged: UnchangedLeaves, directory: str, part: StagedPart) -> None:
    unchanged.committed(directory, [part], {"state": (0, WRITTEN)})


def test_same_array_is_known() -> None:
    unchanged, array = UnchangedLeaves(), jnp.ones(3)
    commit(unchanged, "/1", staged(unchanged, {"w": array}))
    known = unchanged.known(staged(unchanged, {"w": array}))
    assert known.same == {"w"}
    assert known.before is not None
    assert known.before.directory == "/1"
    assert unchanged.known(staged(unchanged, {"w": jnp.ones(3)})).same == frozenset()


def test_numpy_array_is_never_the_same() -> None:
    unchanged, array = UnchangedLeaves(), np.ones(3)
    array.flags.writeable = False
    commit(unchanged, "/1", staged(unchanged, {"w": array}))
    assert unchanged.known(staged(unchanged, {"w": array})).same == frozenset()


def test_array_in_memory_of_the_host_is_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    unchanged, array = UnchangedLeaves(), jnp.ones(3)
    assert identity.is_host_memory(array.sharding)
    commit(unchanged, "/1", staged(unchanged, {"w": array}))
    assert unchanged.known(staged(unchanged, {"w": array})).same == frozenset()


def test_array_of_a_save_before_the_last_is_not_the_same() -> None:
    unchanged, array = UnchangedLeaves(), jnp.ones(3)
    commit(unchanged, "/1", staged(unchanged, {"w": array}))
    part = staged(unchanged, {"w": array})  # while the next save is still under way
    commit(unchanged, "/2", staged(unchanged, {"w": jnp.zeros(3)}))
    known = unchanged.known(part)
    assert known.same == frozenset()
    assert known.before is not None
    assert known.before.directory == "/2"


def test_nothing_is_known_after_a_failure() -> None:
    unchanged, array = UnchangedLeaves(), jnp.ones(3)
    commit(unchanged, "/1", staged(unchanged, {"w": array}))
    part = staged(unchanged, {"w": array})
    unchanged.forget()
    assert unchanged.known(part) == (None, frozenset(), frozenset())


def test_pattern_that_selects_nothing_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    unchanged = UnchangedLeaves(["w", "base/**"])
    with caplog.at_level(logging.WARNING, "jaxckpt_train"):
        for _ in range(2):
            unchanged.look([staged(unchanged, {"w": jnp.ones(3)})])
    assert caplog.text.count("'base/**' selects no leaf of what is saved: 'w'\n") == 1
    assert unchanged.known(staged(unchanged, {"w": jnp.ones(3), "v": jnp.ones(3)})).frozen == {"w"}
