"""Names of step directories: what is one, what is not, and which steps exist."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.step_names import MAX_STEP, check_step, parse_step_name, step_name


@given(st.integers(0, MAX_STEP - 1), st.integers(0, 999_999))
def test_a_name_tells_its_step_and_generation(step: int, generation: int) -> None:
    assert parse_step_name(step_name(step, generation)) == (step, generation)


def test_names_sort_as_steps_do_up_to_ten_digits() -> None:
    assert step_name(100) == "step-0000000100"
    assert step_name(100, 1) == "step-0000000100.g1"
    assert step_name(99) < step_name(100) < step_name(9_999_999_999)


@pytest.mark.parametrize(
    "name",
    [
        "step-100", "step-00000000100", "step-0000000100.g0", "step-0000000100.g01", "step-0000000100.g", "step-",
        ".step-0000000100.tmp-1-0", ".step-0000000100.deleting", "step-0000000100 ", "step-0000000100\n", "100",
        "step-0000000\uff1100", "Step-0000000100",
    ],
)  # fmt: skip
def test_anything_else_is_no_step(name: str) -> None:
    assert parse_step_name(name) is None


@pytest.mark.parametrize("step", [0, 5, np.int64(5), np.uint8(5), MAX_STEP - 1])
def test_whole_numbers_are_steps(step: Any) -> None:
    found = check_step(step)
    assert type(found) is int
    assert found == step


def test_an_integer_of_a_device_is_a_step() -> None:
    assert check_step(jnp.int32(7)) == 7


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, [1], 1 + 0j])
def test_what_is_no_whole_number_is_refused(step: Any) -> None:
    with pytest.raises(SettingsError, match="expected a whole number of completed updates, found"):
        check_step(step)


@pytest.mark.parametrize("step", [-1, MAX_STEP])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    with pytest.raises(SettingsError, match=f"expected 0 to 999999999999999, found {step}"):
        check_step(step)
