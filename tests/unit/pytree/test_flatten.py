"""Flattening: names, leaves and containers in JAX's order, and the way back."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.pytree import flatten as flatten_module
from jaxckpt_train.pytree.flatten import PLACEHOLDER, flatten, unflatten
from jaxckpt_train.pytree.leaves import EMPTY


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    kernel: Any
    bias: Any


class Pair:
    """Registered without keys: JAX knows its children by position only."""

    def __init__(self, first: Any, second: Any) -> None:
        self.children = (first, second)


jax.tree_util.register_pytree_node(Pair, lambda pair: (pair.children, None), lambda _, children: Pair(*children))


class AxisMetadata:
    """Named like the base class of Flax's boxes, by which they are known."""


AxisMetadata.__module__ = "flax.core.meta"


class Box(AxisMetadata):
    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_with_keys(
    Box, lambda box: ([(jax.tree_util.GetAttrKey("value"), box.value)], None), lambda _, children: Box(children[0])
)


class SpecialBox(Box):
    pass


jax.tree_util.register_pytree_node(SpecialBox, lambda box: ((box.value,), None), lambda _, c: SpecialBox(c[0]))

leaves = st.integers() | st.none() | st.text(max_size=3) | st.floats(allow_nan=False)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(-5, 20), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Weights, inner, inner),
        st.builds(collections.OrderedDict, st.dictionaries(st.sampled_from("abc"), inner, max_size=2)),
    ),
    max_leaves=12,
)


@given(trees)
def test_unflatten_reverses_flatten(tree: Any) -> None:
    flat = flatten(tree)
    assert len(flat.names) == len(flat.leaves) == len(set(flat.names))
    again = unflatten(tree, flat.leaves)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert again == tree


@given(trees)
def test_leaves_are_those_of_jax_plus_none(tree: Any) -> None:
    own = [leaf for leaf in flatten(tree).leaves if leaf is not None and leaf is not EMPTY]
    assert [id(leaf) for leaf in own] == [id(leaf) for leaf in jax.tree.leaves(tree)]


def test_names_and_containers_of_every_kind_of_node() -> None:
    tree = {
        "list": [1, 2],
        "tuple": (3,),
        "point": Point(4, y=5),
        "weights": Weights(kernel=6, bias=7),
        "pair": Pair(8, 9),
        "ordered": collections.OrderedDict(z=10, a=11),
        "counted": collections.defaultdict(int, b=12),
        "nothing": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }
    flat = flatten(tree)
    assert dict(zip(flat.names, flat.leaves, strict=True)) == {
        "list/0": 1, "list/1": 2, "tuple/0": 3, "point/x": 4, "point/y": 5, "weights/kernel": 6, "weights/bias": 7,
        "pair/0": 8, "pair/1": 9, "ordered/z": 10, "ordered/a": 11, "counted/b": 12, "nothing": None,
        "empty/dict": EMPTY, "empty/list": EMPTY, "empty/tuple": EMPTY,
    }  # fmt: skip
    kinds = {path: sort.partition(" ")[0] for path, sort in flat.containers.items()}
    assert kinds == {
        "list": "list", "tuple": "tuple", "point": "namedtuple", "weights": "object", "pair": "object",
        "ordered": "object", "counted": "object", "empty/list": "list", "empty/tuple": "tuple",
    }  # fmt: skip
    assert flat.containers["point"].endswith("test_flatten.Point")
    assert flat.containers["ordered"] == "object collections.OrderedDict"


@pytest.mark.parametrize("root", [5, None, "text", np.arange(3)])
def test_a_single_leaf_is_the_root(root: Any) -> None:
    flat = flatten(root)
    assert flat.names == ["~"]
    assert flat.leaves[0] is root


@pytest.mark.parametrize("root", [{}, [], ()])
def test_empty_root_is_leaf_of_its_own(root: Any) -> None:
    assert flatten(root).leaves == [EMPTY]
    assert unflatten(root, [EMPTY]) == root


def test_a_placeholder_is_a_leaf() -> None:
    assert flatten({"a": PLACEHOLDER}).leaves == [...]


def test_box_has_path_of_its_content() -> None:
    tree = {"a": Box(1), "b": SpecialBox({"c": 2}), "d": Box(Box(3))}
    flat = flatten(tree)
    assert dict(zip(flat.names, flat.leaves, strict=True)) == {"a": 1, "b/c": 2, "d": 3}
    assert flat.containers == {}
    again = unflatten(tree, [4, 5, 6])
    assert (again["a"].value, again["b"].value, again["d"].value.value) == (4, {"c": 5}, 6)
    assert isinstance(again["b"], SpecialBox)


class Clash:
    pass


jax.tree_util.register_pytree_with_keys(
    Clash,
    lambda _: ([(jax.tree_util.DictKey("same"), 1), (jax.tree_util.DictKey("same"), 2)], None),
    lambda _, children: Clash(),
)


class Blurred:
    """Two keys that are different in Python and would be the same in a path."""


jax.tree_util.register_pytree_with_keys(
    Blurred,
    lambda _: ([(jax.tree_util.DictKey(1), 1), (jax.tree_util.DictKey(np.int8(1) + np.int8(0)), 2)], None),
    lambda _, children: Blurred(),
)


@pytest.mark.parametrize("kind", [Clash, Blurred])
def test_children_with_one_key_are_known_by_position(kind: type) -> None:
    assert flatten({"a": kind()}).names == ["a/0", "a/1"]


class Named:
    def __init__(self, key: str) -> None:
        self.key = key

    def __hash__(self) -> int:
        return hash(id(self))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __index__(self) -> int:
        return 1

    def __lt__(self, other: object) -> bool:
        return id(self) < id(other)


def test_two_leaves_with_one_path_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="'a/1'"):
        flatten({"a": {Named("x"): 1, Named("y"): 2}})


def test_tree_too_deep_to_read_is_refused() -> None:
    tree: Any = 1
    for _ in range(250):
        tree = {"d": tree}
    with pytest.raises(UnsupportedLeafError, match="deeper than 200 levels"):
        flatten(tree)


# Names of large trees are cached. The cached names must be those that a walk over the tree finds.

MANY = 64  # the least number of leaves of a tree whose names are cached


@pytest.fixture
def kept() -> Iterator[collections.OrderedDict[Any, Any]]:
    """The cache of names, empty at first."""
    flatten_module._known.clear()
    yield flatten_module._known
    flatten_module._known.clear()


def same_as_walked(tree: Any) -> bool:
    """Flatten a tree twice and return whether the second call used the cache."""
    flatten(tree)
    found, walked = flatten(tree), flatten_module._flatten_uncached(tree)
    assert list(found.names) == walked.names
    assert [id(leaf) for leaf in found.leaves] == [id(leaf) for leaf in walked.leaves]
    assert found.containers == walked.containers
    return any(known.names is found.names for known in flatten_module._known.values())


def refilled(tree: Any, fill: Any) -> Any:
    return jax.tree.map(lambda _: fill(), tree)


@settings(max_examples=100)
@given(st.lists(trees, min_size=1, max_size=5))
def test_names_that_are_kept_are_those_of_tree(parts: list[Any]) -> None:
    """Any structures next to enough leaves, in sequence, and again with other leaves."""
    large = [{"filling": [object() for _ in range(MANY)], "part": part} for part in parts]
    large += [[part, (Point(None, part), {}), large[0]["filling"]] for part in parts]
    for tree in [*large, *large, *[refilled(tree, object) for tree in large]]:
        assert same_as_walked(tree) == flatten_module._has_plain_keys(flatten_module._flatten_uncached(tree))
        assert unflatten(tree, flatten(tree).leaves) == tree
    assert len(flatten_module._known) <= 4


class OtherPoint(NamedTuple):
    x: Any
    y: Any


class Swapped(NamedTuple):
    y: Any
    x: Any


ALIKE: list[Any] = [
    {"a": 1, "b": 2},
    {"a": 1, "c": 2},
    {"b": 1, "a": 2},
    collections.OrderedDict(a=1, b=2),
    collections.OrderedDict(b=2, a=1),
    collections.defaultdict(int, a=1, b=2),
    {0: 1, 1: 2},
    {"0": 1, "1": 2},
    {"a/b": 1, "b": 2},
    [1, 2],
    (1, 2),
    Point(1, 2),
    OtherPoint(1, 2),
    Swapped(1, 2),
    Weights(1, 2),
    Pair(1, 2),
    [Box(1), 2],
    [1, 2, None],
    [1, None, 2],
    [None, 1, 2],
    [1, 2, []],
    [1, 2, {}],
    [1, 2, ()],
    [1, [], 2],
    [[1, 2]],
    [[1], 2],
    [1, [2]],
]


@pytest.mark.parametrize("backwards", [False, True])
def test_similar_structures_are_distinguished(kept: dict[Any, Any], backwards: bool) -> None:
    filling = [object() for _ in range(MANY)]
    large = [{"part": part, "filling": filling} for part in ALIKE]
    for tree in large[::-1] if backwards else large:
        assert same_as_walked(tree) == flatten_module._has_plain_keys(flatten_module._flatten_uncached(tree))
        assert len(kept) <= 4
    for first in large:
        for second in large:
            kept.clear()
            flatten(first)
            assert list(flatten(second).names) == flatten_module._flatten_uncached(second).names
            assert flatten(second).containers == flatten_module._flatten_uncached(second).containers


def test_only_large_structures_are_kept(kept: dict[Any, Any]) -> None:
    assert not same_as_walked([0] * (MANY - 1))
    assert not same_as_walked([None] * MANY)
    assert not kept
    assert same_as_walked([0] * MANY)


def test_recent_structures_are_kept_without_leaves(kept: dict[Any, Any]) -> None:
    class Leaf:
        pass

    references = []
    for number in range(10):
        leaves = [Leaf() for _ in range(MANY + number)]
        flatten({"x": [leaves, None, {}]})
        references += [weakref.ref(leaf) for leaf in leaves]
        assert len(kept) == min(number + 1, 4)
    del leaves
    assert not any(reference() for reference in references)
    assert {len(known.names) for known in kept.values()} == {MANY + number + 2 for number in range(6, 10)}


class Static:
    """Static data of a tree, which compares and hashes in its own way."""

    def __init__(self, value: Any, hashable: bool = True) -> None:
        self.value, self.hashable = value, hashable

    def __hash__(self) -> int:
        if not self.hashable:
            raise TypeError("cannot be hashed")
        return 7

    def __eq__(self, other: object) -> Any:
        return self.value == other.value if isinstance(other, Static) else NotImplemented


class Incomparable(Static):
    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise TypeError("cannot be compared")


class WithStatic:
    """A node with static data."""

    def __init__(self, child: Any, static: Any) -> None:
        self.child, self.static = child, static


jax.tree_util.register_pytree_with_keys(
    WithStatic,
    lambda node: ([(jax.tree_util.GetAttrKey("child"), node.child)], node.static),
    lambda static, children: WithStatic(children[0], static),
)

STATIC = {
    "no hash": lambda: Static(1, hashable=False),
    "no truth": lambda: Static(np.arange(3)),  # the result of a comparison of arrays has no truth value
    "no comparison": lambda: Incomparable(1),
    "array": lambda: np.arange(3),
    "list": lambda: [1, 2],
    "unequal to itself": lambda: float("nan"),
    "plain": lambda: "text",
}


@pytest.mark.parametrize("name", list(STATIC))
def test_static_data_of_any_kind_is_accepted(kept: dict[Any, Any], name: str) -> None:
    for turn in range(3):
        tree = {"a": WithStatic([object() for _ in range(MANY)], STATIC[name]()), "turn": turn}
        found, walked = flatten(tree), flatten_module._flatten_uncached(tree)
        assert (list(found.names), found.containers) == (walked.names, walked.containers)
        assert [id(leaf) for leaf in found.leaves] == [id(leaf) for leaf in walked.leaves]
    assert len(kept) <= 4


def test_error_of_large_tree_is_raised_each_time(kept: dict[Any, Any]) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError, match="'0/1'"):
            flatten([{Named("x"): 1, Named("y"): 2}, [0] * MANY])
    assert not kept


@pytest.mark.parametrize(("first", "second"), [(1, True), (True, 1), (1, 1.0), (1.0, 1), (0.0, -0.0)])
def test_equal_keys_of_other_types_keep_names(first: object, second: object) -> None:
    flatten_module._known.clear()
    flatten({first: [0] * 64})
    tree = {second: [0] * 64}
    assert list(flatten(tree).names) == flatten_module._flatten_uncached(tree).names
