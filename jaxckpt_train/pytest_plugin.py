"""The pytest plugin: the fixture `resume_proof`. Imports nothing of this package before it is used, and no JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def resume_proof(tmp_path: Path) -> Callable[..., Any]:
    """`jaxckpt_train.testing.assert_resume_exact`, with what the runs leave in the test's temporary directory."""
    numbers = itertools.count(1)

    def prove(make_run: Any, **arguments: Any) -> Any:
        __tracebackhide__ = True
        from jaxckpt_train.testing import assert_resume_exact

        directory = tmp_path / f"resume-proof-{next(numbers)}"
        return assert_resume_exact(make_run, **{"directory": directory, **arguments})

    return prove
