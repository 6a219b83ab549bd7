"""JAX's preemption service: its private names exist, and behave as this package expects."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax
import pytest

from jaxckpt_train.distributed.jax_service import preemption_service
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running


def leave(after: int) -> list[Any]:
    """Ask until all leave; process 1 gets the signal at some call."""
    service = preemption_service()
    assert service is not None
    assert service is preemption_service()
    before_s, calls, sent_at = service.noticed_before_s(), 0, time.time()
    while not service.is_reached():
        calls += 1
        if calls == after and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            sent_at = time.time()
        assert time.time() < sent_at + 60
    return [before_s, calls, service.noticed_before_s(), time.time() - sent_at, service.is_reached()]


def test_all_leave_at_one_call_and_know_when() -> None:
    with running(3) as job:
        answers = job.call(leave, 1000)
    assert [answer[0] for answer in answers] == [0.0] * 3
    assert len({answer[1] for answer in answers}) == 1
    assert answers[0][1] > 1000
    for answer in answers:
        assert 0 < answer[2] < 30
        assert answer[4], "from then on"
    assert answers[1][2] <= answers[1][3] + 0.1, "noticed after it was sent"


def is_there() -> bool:
    return preemption_service() is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_service_exists_unless_switched_off(enabled: bool) -> None:
    with running(2, preemption_service=enabled) as job:
        assert job.call(is_there) == [enabled] * 2


def test_single_process_has_no_service(job_of: JobOf) -> None:
    assert job_of(1, 1).call(is_there) == [False]
