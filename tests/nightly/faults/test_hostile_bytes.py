"""Property tests of all readers: arbitrary bytes and changed valid files raise only a `CheckpointError`."""

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
    "record", "value", "iterator", "Flax file", "lock", "many chunks",
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
    """Read a file, and let any error but a `CheckpointError` fail the test."""
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
def test_arbitrary_bytes_raise_only_checkpoint_errors(name: str) -> None:
    check(name, st.binary(max_size=300) | lines(st.binary(max_size=40)))


@every_target
def test_arbitrary_json_raises_only_checkpoint_errors(name: str) -> None:
    check(name, lines(trees.map(lambda tree: json.dumps(tree).encode())))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Flax file"])
def test_any_field_value_raises_only_checkpoint_errors(name: str) -> None:
    """Change a field of the last line. A Flax file is no JSON, so it has no fields."""
    sound = targets().all[name][0]
    prefix = 8 if name.startswith("segment") else 0
    last = sound[prefix:].splitlines()[-1]
    tree = json.loads(last)

    def put(field: str, value: object) -> bytes:
        text = json.dumps({**tree, field: value}, separators=(",", ":")).encode()
        return sound[:prefix] + sound[prefix:].replace(last, text)

    check(name, st.builds(put, st.sampled_from(sorted(tree)) | keys, trees))


@every_target
def test_any_change_raises_only_checkpoint_errors(name: str) -> None:
    sound = targets().all[name][0]

    def change(chance: random.Random) -> bytes:
        return changed(sound, chance)

    check(name, st.randoms(use_true_random=False).map(change))


@every_target
def test_any_piece_raises_only_checkpoint_errors(name: str) -> None:
    sound = targets().all[name][0]
    at = st.integers(0, len(sound))
    check(
        name, st.builds(lambda start, stop, more: sound[:start] + more + sound[stop:], at, at, st.binary(max_size=20))
    )


def test_reader_without_json_errors_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (committed, manifest_module):
        monkeypatch.setattr(module, "NOT_JSON", UnicodeDecodeError)
    for finds in (
        test_arbitrary_bytes_raise_only_checkpoint_errors,
        test_arbitrary_json_raises_only_checkpoint_errors,
        test_any_field_value_raises_only_checkpoint_errors,
        test_any_change_raises_only_checkpoint_errors,
        test_any_piece_raises_only_checkpoint_errors,
    ):
        with pytest.raises((msgspec.MsgspecError, RecursionError)):
            finds("COMMIT")


def test_every_target_is_tested() -> None:
    assert set(NAMES) == set(targets().all)
