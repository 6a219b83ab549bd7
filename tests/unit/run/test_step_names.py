"""Names of step directories: which names are valid, which numbers are steps, and which name is free."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import CheckpointExistsError, SettingsError
from jaxckpt_train.run.entry import MAX_GENERATION, MAX_STEP, check_step, free_step_name, parse_step_name, step_name


@given(st.integers(0, MAX_STEP - 1), st.integers(0, MAX_GENERATION))
def test_a_name_tells_its_step_and_generation(step: int, generation: int) -> None:
    assert parse_step_name(step_name(step, generation)) == (step, generation)


def test_names_sort_like_numbers_to_ten_digits() -> None:
    assert step_name(100) == "step-0000000100"
    assert step_name(100, 1) == "step-0000000100.g1"
    assert step_name(99) < step_name(100) < step_name(9_999_999_999)


@pytest.mark.parametrize(
    "name",
    [
        "step-100", "step-00000000100", "step-0000000100.g0", "step-0000000100.g01", "step-0000000100.g", "step-",
        ".step-0000000100.tmp-1-0", ".step-0000000100.deleting", "step-0000000100 ", "step-0000000100\n", "100",
        "step-0000000\uff1100", "Step-0000000100", "step-0000000100.g1000000", "step-0000000100.g" + "9" * 5000,
    ],
)  # fmt: skip
def test_other_names_are_not_steps(name: str) -> None:
    assert parse_step_name(name) is None


@pytest.mark.parametrize("step", [0, 5, np.int64(5), np.uint8(5), MAX_STEP - 1])
def test_whole_numbers_are_steps(step: Any) -> None:
    found = check_step(step)
    assert type(found) is int
    assert found == step


def test_an_integer_of_a_device_is_a_step() -> None:
    assert check_step(jnp.int32(7)) == 7


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, [1], 1 + 0j])
def test_steps_must_be_whole_numbers(step: Any) -> None:
    with pytest.raises(SettingsError, match="expected a whole number"):
        check_step(step)


@pytest.mark.parametrize("step", [-1, MAX_STEP])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    with pytest.raises(SettingsError, match=f"from 0 to 999999999999999, found {step}"):
        check_step(step)


@given(st.sets(st.integers(0, MAX_GENERATION - 1)))
def test_free_name_follows_highest_generation(taken: set[int]) -> None:
    other = [step_name(6, MAX_GENERATION), "step-5", "step-0000000005.g9999999", ".lock"]
    names = [*(step_name(5, generation) for generation in taken), *other]
    assert free_step_name(5, names) == step_name(5, max(taken, default=-1) + 1)


def test_exhausted_generations_are_refused() -> None:
    last = step_name(5, MAX_GENERATION)
    with pytest.raises(CheckpointExistsError, match=last):
        free_step_name(5, [last])
