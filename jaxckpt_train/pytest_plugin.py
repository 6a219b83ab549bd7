"""The pytest plugin with the fixture `resume_proof`. It imports neither JAX nor this package until it is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def resume_proof(tmp_path: Path) -> Callable[..., Any]:
    """`jaxckpt_train.testing.assert_resume_exact`, whose runs write to the test's temporary directory."""
    numbers = itertools.count(1)

    def prove(make_run: Any, **arguments: Any) -> Any:
        __tracebackhide__ = True
        from jaxckpt_train.testing import assert_resume_exact

        directory = tmp_path / f"resume-proof-{next(numbers)}"
        return assert_resume_exact(make_run, **{"directory": directory, **arguments})

    return prove
