"""Plain content: JSON values, and objects with get_state and set_state."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train.checkpointables import loading
from tests.support.same_trees import assert_same

FAST = jct.StoreSettings(durability="none")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def round_trip(path: Path, value: Any) -> Any:
    jct.save_checkpointables(path, {"notes": jct.JsonValue(value)}, settings=FAST, overwrite=True)
    (found,) = jct.load_checkpointables(path).values()
    assert isinstance(found, jct.JsonValue)
    return found.value


@given(plain)
def test_json_values_come_back_unchanged(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    found = round_trip(tmp_path_factory.mktemp("json") / "c", value)
    assert found == value
    assert repr(found) == repr(value)  # True is not 1


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 2**63, -(2**63), 2**64, 1e300])
def test_unusual_json_values(value: Any, tmp_path: Path) -> None:
    assert round_trip(tmp_path / "c", value) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [-math.inf, 1, {"b": math.nan, "ü": "ü", "c": None}]}])
def test_nan_and_inf_in_json_come_back(value: Any, tmp_path: Path) -> None:
    assert repr(round_trip(tmp_path / "c", value)) == repr(value)
    assert jct.verify(tmp_path / "c").ok


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1: 2}, {1: math.nan}, (math.inf,), {1, 2}, b"b", np.arange(2), jnp.ones(2), object(), [{"a": (1,)}]],
    ids=lambda value: type(value).__name__,
)
def test_values_json_would_change_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(jct.UnsupportedLeafError, match=r"'notes': .*JSON"):
        jct.save_checkpointables(tmp_path / "c", {"notes": jct.JsonValue(value)})
    assert list(tmp_path.iterdir()) == []


def test_json_value_changed_after_call_is_saved_unchanged(tmp_path: Path) -> None:
    notes = {"a": [1]}
    pending = jct.save_checkpointables_async(tmp_path / "c", {"notes": jct.JsonValue(notes)})
    notes["a"].append(2)
    pending.wait()
    assert jct.load_checkpointables(tmp_path / "c", {"notes": jct.JsonValue(None)}) == {
        "notes": jct.JsonValue({"a": [1]})
    }


def test_json_value_and_pytree_are_not_interchangeable(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"notes": jct.JsonValue({"a": 1}), "tree": {"a": 1}})
    with pytest.raises(jct.MismatchError, match=r"'notes': .*'json'.* dict .'pytree'."):
        jct.load_checkpointables(tmp_path / "c", {"notes": {"a": 1}})
    with pytest.raises(jct.MismatchError, match=r"'tree': .*'pytree'.* JsonValue"):
        jct.load_checkpointables(tmp_path / "c", {"tree": jct.JsonValue(None)})


@pytest.mark.parametrize("verified", [True, False])
def test_values_are_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: bool) -> None:
    """The checkpoint is overwritten after the first value was read."""

    def saved(number: int) -> dict[str, Any]:
        return {"a": jct.JsonValue({"at": number}), "b": jct.JsonValue({"at": number})}

    read, reads = loading.read_recorded, itertools.count()

    def read_after(*arguments: Any) -> Any:
        if next(reads) == 1:
            jct.save_checkpointables(tmp_path / "c", saved(2), overwrite=True)
        return read(*arguments)

    jct.save_checkpointables(tmp_path / "c", saved(1))
    monkeypatch.setattr(loading, "read_recorded", read_after)
    found = jct.load_checkpointables(tmp_path / "c", settings=jct.StoreSettings(verify_on_load=verified))
    # Both files are open from the start. Without digests, the load cannot show that they are of one checkpoint.
    number, expected = (1, 2) if verified else (2, 4)
    assert next(reads) == expected
    assert found == {"a": jct.JsonValue({"at": number}), "b": jct.JsonValue({"at": number})}


def test_removed_checkpoint_is_read_to_its_end(tmp_path: Path) -> None:
    parts = {name: {"w": np.full(100_000, number)} for number, name in enumerate("abc")}
    jct.save_checkpointables(tmp_path / "c", {**parts, "notes": jct.JsonValue({"at": 1})})

    def remove(count: int) -> None:
        if count:
            shutil.rmtree(tmp_path / "c", ignore_errors=True)

    found = jct.load_checkpointables(tmp_path / "c", progress=remove)
    assert not (tmp_path / "c").exists()
    assert found.pop("notes") == jct.JsonValue({"at": 1})
    assert_same(found, parts)


def test_without_verification_a_json_value_needs_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = jct.StoreSettings(digest="blake3", verify_on_load=False)
    jct.save_checkpointables(tmp_path / "c", {"notes": jct.JsonValue({"a": 1})}, settings=chosen)
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert jct.load_checkpointables(tmp_path / "c", settings=chosen)["notes"] == jct.JsonValue({"a": 1})


def test_a_damaged_json_file_is_corrupt(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"notes": jct.JsonValue({"rate": 1})})
    file = tmp_path / "c" / "notes" / "p00000.json"
    file.write_text(file.read_text().replace("1", "2"))
    with pytest.raises(jct.CorruptCheckpointError, match=r"notes/p00000.json"):
        jct.load_checkpointables(tmp_path / "c")


class Sampler:
    """A classic iterator: its state is a pytree of numpy arrays and numbers."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)
        self.drawn: list[int] = []

    def draw(self) -> int:
        self.drawn.append(int(self.random.randint(1000)))
        return self.drawn[-1]

    def get_state(self) -> Any:
        return {"random": self.random.get_state(), "drawn": self.drawn}

    def set_state(self, state: Any) -> None:
        self.random.set_state(state["random"])
        self.drawn = state["drawn"]


def test_object_with_get_state_resumes_at_its_position(tmp_path: Path) -> None:
    saved = Sampler(0)
    first = [saved.draw() for _ in range(5)]
    pending = jct.save_checkpointables_async(tmp_path / "c", {"sampler": saved})
    following = [saved.draw() for _ in range(5)]
    pending.wait()
    target = Sampler(7)
    found = jct.load_checkpointables(tmp_path / "c", {"sampler": target})
    assert found["sampler"] is target
    assert target.drawn == first
    assert [target.draw() for _ in range(5)] == following


def test_state_of_object_loads_without_target(tmp_path: Path) -> None:
    saved = Sampler(0)
    saved.draw()
    jct.save_checkpointables(tmp_path / "c", {"sampler": saved})
    found = jct.load_checkpointables(tmp_path / "c")["sampler"]
    assert found["drawn"] == saved.drawn
    assert isinstance(found["random"], tuple)
    assert found["random"][1].tobytes() == saved.random.get_state()[1].tobytes()


def test_state_is_not_loaded_into_plain_tree(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "c", {"sampler": Sampler(0)})
    with pytest.raises(jct.MismatchError, match=r"'sampler': .*'get_set_state'.* dict"):
        jct.load_checkpointables(tmp_path / "c", {"sampler": {"drawn": []}})


def test_class_with_get_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(jct.UnsupportedLeafError, match=r"'sampler': leaf '~': .*builtins.type"):
        jct.save_checkpointables(tmp_path / "c", {"sampler": Sampler})
