"""Patterns of leaf paths: what wildcards match, and which patterns are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.pytree.leaves import leaf_filter

NAMES = [
    "params/dense/kernel",
    "params/dense/bias",
    "params/norm",
    "opt/0/mu/dense/kernel",
    "step",
    "params.x",
    "params",
    "two\nlines/kernel",
]


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("params/**", {"params/dense/kernel", "params/dense/bias", "params/norm"}),
        ("params/*", {"params/norm"}),
        ("**/kernel", {"params/dense/kernel", "opt/0/mu/dense/kernel", "two\nlines/kernel"}),
        ("*/*/kernel", {"params/dense/kernel"}),
        ("ste?", {"step"}),
        ("st?", set()),
        ("params.x", {"params.x"}),
        ("params", {"params"}),
        (["step", "params/norm"], {"step", "params/norm"}),
        (("step",), {"step"}),
        ([], set()),
        ("**", set(NAMES)),
        (None, set(NAMES)),
        (lambda name: name.endswith("bias"), {"params/dense/bias"}),
    ],
)
def test_a_pattern_chooses(only: Any, chosen: set[str]) -> None:
    assert set(filter(leaf_filter(only), NAMES)) == chosen


@given(st.text(max_size=12))
def test_pattern_without_stars_matches_itself_only(text: str) -> None:
    if not set(text) & set("*?"):
        assert leaf_filter(text)(text)
        assert not leaf_filter(text)(f"{text}x")


@pytest.mark.parametrize("only", [3, 1.5, [3], ["a", None], object()])
def test_invalid_pattern_is_refused(only: Any) -> None:
    with pytest.raises(SettingsError, match=r'only: .*"params/\*\*"'):
        leaf_filter(only)
