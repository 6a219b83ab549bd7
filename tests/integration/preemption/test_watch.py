"""Signal handlers and forked children."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.signal_handlers import WATCHED, handlers_put_back


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED):
        yield


POOL = """
import multiprocessing, time
from jaxckpt_train.preemption.sources import SignalNotice
notice = SignalNotice(["SIGTERM"])
notice.install()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(abs, range(4))
    pool.map_async(time.sleep, [600] * 4)
assert notice.received is None
"""


def test_forked_children_die_of_signals(run_python: Any) -> None:
    run_python(POOL, check=True, timeout_s=60)
