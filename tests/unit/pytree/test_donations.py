"""A loop that donates large state while a save holds it: the next save copies the state instead."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxckpt_train.pytree import copies
from jaxckpt_train.pytree import snapshot as snapshot_module
from jaxckpt_train.pytree.snapshot import Snapshot, snapshot

LARGE = snapshot_module.LEAST_BYTES // 4


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    snapshot_module._donated.clear()
    yield
    snapshot_module._donated.clear()


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, state)


def state_of(elements: int, **more: Any) -> dict[str, Any]:
    return {"w": jnp.arange(elements, dtype=jnp.float32), "b": {"x": jnp.ones(3)}, **more}


def data_of(taken: Snapshot) -> np.ndarray:
    data = next(array for array in taken.arrays if array.name.endswith("w")).chunks[0].data
    assert isinstance(data, (np.ndarray, memoryview))
    return np.asarray(data)


def holds_memory_of(taken: Snapshot, leaf: jax.Array) -> bool:
    return bool(data_of(taken).ctypes.data == leaf.unsafe_buffer_pointer())


def content(taken: Snapshot) -> bytes:
    return data_of(taken).tobytes()


def test_the_first_save_holds_and_the_next_copies() -> None:
    state = state_of(LARGE)
    first = snapshot(state)
    assert holds_memory_of(first, state["w"])
    state = step(state)
    assert content(first) == np.arange(LARGE, dtype=np.float32).tobytes()
    first.close()
    second = snapshot(state)
    assert not holds_memory_of(second, state["w"])
    place = state["w"].unsafe_buffer_pointer()
    state = step(state)
    assert state["w"].unsafe_buffer_pointer() == place, "the step reuses the memory that it is donated"
    assert content(second) == (np.arange(LARGE, dtype=np.float32) + 1).tobytes()
    second.close()
    assert not holds_memory_of(snapshot(state), state["w"])


def test_state_is_held_without_memory_for_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(size: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    state = state_of(LARGE)
    first = snapshot(state)
    state = step(state)
    first.close()
    monkeypatch.setattr(copies, "_take_kept_area", none_left)
    assert holds_memory_of(snapshot(state), state["w"])
    with pytest.raises(OSError, match="Cannot allocate"):
        snapshot(state, "host")


def test_loop_that_does_not_donate_is_never_copied() -> None:
    state = state_of(LARGE)
    for _ in range(3):
        taken = snapshot(state)
        assert holds_memory_of(taken, state["w"])
        state = jax.tree.map(lambda leaf: leaf + 1, state)
        taken.close()


def test_donation_after_save_does_not_cause_copies() -> None:
    state = state_of(LARGE)
    for _ in range(2):
        taken = snapshot(state)
        assert holds_memory_of(taken, state["w"])
        taken.close()
        state = step(state)


def test_small_state_is_never_copied() -> None:
    state = state_of(LARGE // 2)
    for _ in range(2):
        taken = snapshot(state)
        assert holds_memory_of(taken, state["w"])
        state = step(state)
        taken.close()


def test_other_trees_are_still_held() -> None:
    state, other = state_of(LARGE), state_of(LARGE, more=jnp.ones(1))
    taken = snapshot(state)
    state = step(state)
    taken.close()
    assert holds_memory_of(snapshot(other), other["w"])
    assert not holds_memory_of(snapshot(state), state["w"])


@pytest.mark.parametrize("mode", ["device", "stream"])
def test_explicit_modes_ignore_earlier_donations(mode: Any) -> None:
    state = state_of(LARGE)
    taken = snapshot(state)
    state = step(state)
    taken.close()
    again = snapshot(state, mode)
    assert again.transfers is not None
    assert again.donation is None
    with contextlib.closing(again):
        pass


def test_other_leaves_do_not_hide_donation() -> None:
    state = state_of(LARGE)
    more = {"key": jax.random.key(0), "host": np.ones(5), "lr": 0.1, "none": None}
    taken = snapshot({"state": state, **more})
    step(state)
    taken.close()
    state = state_of(LARGE)
    assert not holds_memory_of(snapshot({"state": state, **more}), state["w"])


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


@jax.tree_util.register_pytree_with_keys_class
class WithStatic:
    """A container whose static data can neither be hashed nor compared."""

    def __init__(self, w: jax.Array) -> None:
        self.w = w

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("w"), self.w)], Unhashable()

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> WithStatic:
        return cls(*children)


def test_state_with_incomparable_static_data_is_held() -> None:
    for _ in range(2):
        tree = WithStatic(jnp.arange(LARGE, dtype=jnp.float32))
        taken = snapshot(tree)
        assert holds_memory_of(taken, tree.w)
        tree.w.delete()
        taken.close()


def test_few_structures_are_remembered() -> None:
    for number in range(10):
        state = {f"w{number}": jnp.zeros(LARGE), "b": jnp.ones(3)}
        taken = snapshot(state)
        step(state)
        taken.close()
    assert len(snapshot_module._donated) == snapshot_module._KEPT_STRUCTURES
