"""A full disk, a read-only one, limits of the process: a clear error, nothing lost, and the next save succeeds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.faults.flaws import FLAWS
from tests.faults.limits import LIMITS, campaign, why_not

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*fork")]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)


def skip_where_it_cannot_be_met(name: str) -> None:
    reason = why_not(name)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@pytest.mark.parametrize("name", LIMITS)
def test_a_run_that_meets_a_limit(tmp_path: Path, name: str) -> None:
    skip_where_it_cannot_be_met(name)
    found = campaign([name], tmp_path)
    assert found.problems == []
    assert found.failed[name] > 0, "no save was refused: the limit was none"


def test_a_writer_that_ignores_errors_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_it_cannot_be_met("full disk")
    FLAWS["errors of writes are ignored"](monkeypatch)
    assert any("CorruptCheckpointError" in problem for problem in campaign(["full disk"], tmp_path).problems)
