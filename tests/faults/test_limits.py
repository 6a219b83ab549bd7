"""A full disk, a read-only one, limits of the process: a clear error, nothing lost, and the next save succeeds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.faults.limits import LIMITS, NEED_ROOT, campaign
from tests.faults.native_calls import FLAWS

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*fork")]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)


def skip_without_root(name: str) -> None:
    if name in NEED_ROOT and os.geteuid() != 0:
        pytest.skip(f"{name}: needs root, to mount")


@pytest.mark.parametrize("name", LIMITS)
def test_a_run_that_meets_a_limit(tmp_path: Path, name: str) -> None:
    skip_without_root(name)
    found = campaign([name], tmp_path)
    assert found.problems == []
    assert found.failed[name] > 0, "no save was refused: the limit was none"


def test_a_writer_that_ignores_errors_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_root("full disk")
    FLAWS["errors are ignored"](monkeypatch)
    assert any("CorruptCheckpointError" in problem for problem in campaign(["full disk"], tmp_path).problems)
