"""A run with a preemption and a kill, its page, and a browser; each is made once a session."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Browser, Tab, chromium, find_chromium
from tests.support.report_runs import LAST_STEP, gathered_of, train_until


@pytest.fixture(scope="session")
def preempted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three processes: preempted in update 24, killed in update 43, finished at step 60. Read only."""
    directory = tmp_path_factory.mktemp("preempted") / "run"
    assert train_until(directory, 23, signal.SIGTERM) == 75
    assert train_until(directory, 42, signal.SIGKILL) == -signal.SIGKILL
    assert train_until(directory, LAST_STEP - 1, None) == 0
    return directory


@pytest.fixture(scope="session")
def preempted_page(preempted_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that run."""
    from jaxckpt_train.report.page import page_of  # needs an optional library

    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page_of(gathered_of(preempted_run)))
    return file


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with chromium(program, tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new tab, light, in a window of 1200 by 900."""
    made = browser.open_tab()
    made.show_as("light")
    yield made
    made.close()
