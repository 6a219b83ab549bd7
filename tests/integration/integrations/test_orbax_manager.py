"""The manager in Orbax's form: the same program gets the same results as with Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from tests.support.orbax_programs import (
    OPTIONS,
    OURS,
    OURS_FOR_ORBAX,
    deleting,
    iterating,
    leaf_by_leaf,
    reading,
    saving,
    several_items,
)

# Orbax warns about its own restores without shardings.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


@pytest.mark.parametrize("name", list(OPTIONS))
def test_same_options_keep_the_same_steps(name: str, tmp_path: Path) -> None:
    expected = saving(ocp, tmp_path / "orbax", OPTIONS[name])
    assert saving(OURS, tmp_path / "ours", OPTIONS[name]) == expected
    assert saving(OURS_FOR_ORBAX, tmp_path / "for orbax", OPTIONS[name]) == expected


@pytest.mark.parametrize("program", [several_items, leaf_by_leaf, reading, deleting, iterating])
def test_same_program_gets_same_answers(program: Callable[[Any, Path], list[Any]], tmp_path: Path) -> None:
    expected = program(ocp, tmp_path / "orbax")
    assert program(OURS, tmp_path / "ours") == expected
    assert program(OURS_FOR_ORBAX, tmp_path / "for orbax") == expected
