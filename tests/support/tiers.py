"""The tiers of the cases of a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def nightly_after(kept: int, cases: Iterable[Any]) -> list[Any]:
    """Leave all but the first cases of a parametrized test to the nightly tier.

    Args:
        kept: how many of them run in every tier.
        cases: values of one argument, or tuples of the values of several.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if number < kept else pytest.mark.nightly for number in range(len(values))]
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]
