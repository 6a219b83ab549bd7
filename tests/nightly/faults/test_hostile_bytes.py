"""Properties of all that reads files: whatever bytes they hold, however a sound file is changed, only our errors."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.store import committed
from jaxckpt_train.store import manifest as manifest_module
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults.hostile import SLOW, Targets
from tests.nightly.faults.mutations import WORDS, changed

pytestmark = pytest.mark.timeout(120)
NAMES = [
    "segment header", "segment", "manifest", "load", "metadata", "steps", "verify", "COMMIT", "history", "notes",
    "value", "iterator", "Flax file", "lock", "many chunks",
]  # fmt: skip
every_target = pytest.mark.parametrize("name", NAMES)

keys = st.text(max_size=8) | st.sampled_from([word for word in WORDS if isinstance(word, str) and word.isprintable()])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | keys | st.integers(min_value=2**62, max_value=10**40)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_sizes():
        yield


@functools.cache
def targets() -> Targets:
    return Targets()


def read(name: str, data: bytes) -> None:
    """Anything else than one of our errors is what a test fails with."""
    with contextlib.suppress(CheckpointError):
        targets().all[name][1](data)


def examples(name: str) -> int:
    return 40 if name in SLOW else 200


def check(name: str, data: st.SearchStrategy[bytes]) -> None:
    @settings(max_examples=examples(name), report_multiple_bugs=False)
    @given(data)
    def holds(given_bytes: bytes) -> None:
        read(name, given_bytes)

    holds()


def lines(text: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(text, min_size=1, max_size=4).map(b"\n".join)


@every_target
def test_whatever_bytes(name: str) -> None:
    check(name, st.binary(max_size=300) | lines(st.binary(max_size=40)))


@every_target
def test_whatever_json(name: str) -> None:
    check(name, lines(trees.map(lambda tree: json.dumps(tree).encode())))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Flax file"])
def test_any_value_in_place_of_one_field(name: str) -> None:
    """Of the last line, if it has several. A Flax file has none: it is no JSON."""
    sound = targets().all[name][0]
    prefix = 8 if name.startswith("segment") else 0
    last = sound[prefix:].splitlines()[-1]
    tree = json.loads(last)

    def put(field: str, value: object) -> bytes:
        text = json.dumps({**tree, field: value}, separators=(",", ":")).encode()
        return sound[:prefix] + sound[prefix:].replace(last, text)

    check(name, st.builds(put, st.sampled_from(sorted(tree)) | keys, trees))


@every_target
def test_whatever_change_of_a_sound_file(name: str) -> None:
    sound = targets().all[name][0]

    def change(chance: random.Random) -> bytes:
        return changed(sound, chance)

    check(name, st.randoms(use_true_random=False).map(change))


@every_target
def test_whatever_piece_of_a_sound_file(name: str) -> None:
    sound = targets().all[name][0]
    at = st.integers(0, len(sound))
    check(
        name, st.builds(lambda start, stop, more: sound[:start] + more + sound[stop:], at, at, st.binary(max_size=20))
    )


def test_reader_that_expects_no_bad_json_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (committed, manifest_module):
        monkeypatch.setattr(module, "NOT_JSON", UnicodeDecodeError)
    for finds in (
        test_whatever_bytes,
        test_whatever_json,
        test_any_value_in_place_of_one_field,
        test_whatever_change_of_a_sound_file,
        test_whatever_piece_of_a_sound_file,
    ):
        with pytest.raises((msgspec.MsgspecError, RecursionError)):
            finds("COMMIT")


def test_every_target_is_here() -> None:
    assert set(NAMES) == set(targets().all)
