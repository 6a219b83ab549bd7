"""Leaf paths: all keys can be parsed from their text, and no two keys have the same text."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train.pytree.leaves import ROOT, find_nested_leaves, join, key_text, parse_key, split
from jaxckpt_train.store.manifest import is_plain_name

TRICKY = [
    "",
    "/",
    "~",
    "@",
    ",",
    "0",
    "-1",
    "-0",
    "00",
    "1.5",
    "__metadata__",
    "~0",
    "~1",
    "~s0",
    "~e",
    "~t",
    "~f",
    "~n",
]
TRICKY += [
    "a/b",
    "a.b",
    "a~b",
    "a@[0:1]",
    "é",
    "Ω/ω",
    "\x00",
    "\n",
    " ",
    "None",
    "True",
    "~b1",
    "~t~e,~e",
    "~3",
    "²",
    "٣",
]

text_keys = st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain_keys = text_keys | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
keys = plain_keys | st.lists(plain_keys, max_size=4).map(tuple)


def same_key(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down: True is not 1, and 1 not 1.0."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_key, a, b))
    return type(a) is type(b) and (a.hex() == b.hex() if isinstance(a, float) else a == b)


@given(st.lists(keys, max_size=5))
def test_keys_come_back_from_text_of_their_path(path: list[Any]) -> None:
    text = ROOT
    for key in path:
        text = join(text, key_text(key, text))
    found = [parse_key(part) for part in split(text)]
    assert len(found) == len(path)
    assert all(map(same_key, found, path)), (text, found)


@given(keys, keys)
def test_distinct_keys_have_distinct_text(a: Any, b: Any) -> None:
    assert (key_text(a, ROOT) == key_text(b, ROOT)) == same_key(a, b)


@given(keys)
def test_key_text_has_no_path_syntax(key: Any) -> None:
    text = key_text(key, ROOT)
    assert text
    assert "/" not in text
    assert "@" not in text
    assert text not in (ROOT, "__metadata__")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("kernel", "kernel"),
        ("3", "~s3"),
        ("", "~e"),
        ("a/b", "a~1b"),
        ("__metadata__", "~m"),
        (3, "3"),
        (-1, "-1"),
        (np.int64(7), "7"),
        (None, "~n"),
        (True, "~b1"),
        (0.5, "~f0x1.0000000000000p-1"),
        ((), "~t"),
        (("a", 1), "~ta,1"),
    ],
)
def test_text_of_key_is_what_format_says(key: Any, text: str) -> None:
    assert key_text(key, ROOT) == text


def test_a_nan_key_has_a_text_too() -> None:
    assert key_text(float("nan"), ROOT) == "~fnan"
    assert parse_key("~fnan") != parse_key("~fnan")


class Layer(enum.StrEnum):
    FIRST = "first"


class Level(enum.IntEnum):
    LOW = 4


def test_enum_keys_are_stored_as_their_value() -> None:
    assert key_text(Layer.FIRST, ROOT) == "first"
    assert key_text(Level.LOW, ROOT) == "4"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (frozenset([1]), r"a number, None or a tuple of these, found frozenset\(\{1\}\) of type frozenset"),
        (b"raw", "found b'raw' of type bytes; convert the key to text"),
        (1j, "found 1j of type complex"),
        (((1, 2), 3), r"found \(\(1, 2\), 3\)"),
        ("\ud800", "expected text of valid Unicode"),
    ],
)
def test_unsupported_key_is_refused_with_its_place(key: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(jct.UnsupportedLeafError, match=reason):
        key_text(key, "params")
    with pytest.raises(jct.UnsupportedLeafError, match=f"'params'.*{reason}"):
        jct.save(tmp_path / "c", {"params": {key: 1}})
    assert list(tmp_path.iterdir()) == []


def test_huge_integer_is_refused_as_key(tmp_path: Path) -> None:
    with pytest.raises(jct.UnsupportedLeafError, match=r"'params': .* of type int"):
        jct.save(tmp_path / "c", {"params": {10**5000: 1}})
    jct.save(tmp_path / "c", {10**4000: 1})
    assert jct.load(tmp_path / "c") == {10**4000: 1}


def test_unsortable_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(jct.UnsupportedLeafError, match="JAX cannot flatten this dict"):
        jct.save(tmp_path / "c", {1: 1, "a": 2})


def test_keys_that_look_alike_stay_apart_on_disk(tmp_path: Path) -> None:
    tree = {
        "dots": {"a.b": np.arange(1), "a": {"b": np.arange(2)}},
        "slashes": {"a/b": np.arange(3), "a": {"b": np.arange(4)}},
        "boxes": {"w@[0:2]": np.arange(5), "w": np.arange(6)},
        "numbers": {0: np.arange(7), 10: np.arange(8), -1: np.arange(9)},
        "digits": {"0": np.arange(10), "10": np.arange(11)},
        "list": [np.arange(12), np.arange(13)],
        "__metadata__": np.arange(14),
    }
    jct.save(tmp_path / "c", tree)
    loaded = jct.load(tmp_path / "c")
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    assert jax.tree.map(len, loaded) == jax.tree.map(len, tree)
    assert [type(key) for key in loaded["numbers"]] == [int, int, int]
    assert [type(key) for key in loaded["digits"]] == [str, str]
    again = jct.load(tmp_path / "c", tree)
    assert jax.tree.map(len, again) == jax.tree.map(len, tree)


@given(st.dictionaries(text_keys, st.integers(0, 9), max_size=6))
def test_dict_with_any_text_keys_is_described_unchanged(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.mktemp("c") / "c"
    settings = jct.StoreSettings(durability="none")
    jct.save(path, tree, settings=settings)
    assert jct.load(path) == tree
    assert jct.load(path, dict.fromkeys(tree, 0)) == tree


def test_no_leaf_path_becomes_a_file_name(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"../../evil": np.arange(3), "/etc/passwd": np.arange(3), "\x00": np.arange(3)})
    files = [path.relative_to(tmp_path / "c").parts for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert sorted(name for parts in files for name in parts if is_plain_name(name)) == [
        "p00000-s000.safetensors",
        "state",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@given(st.lists(st.lists(st.sampled_from(["a", "b", "a.b", ""]), min_size=1, max_size=4).map("/".join), unique=True))
def test_a_leaf_below_another_one_is_found(leaves: list[str]) -> None:
    pairs = {(name, above) for name in leaves for above in leaves if name.startswith(f"{above}/")}
    found = find_nested_leaves(leaves)
    assert found in pairs if pairs else found is None


def test_all_paths_are_below_root() -> None:
    assert find_nested_leaves([ROOT]) is None
    assert find_nested_leaves([ROOT, "a"]) == ("a", ROOT)
