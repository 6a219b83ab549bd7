"""One process of a job stopped or killed in a save or a restore: a few trials of the campaign, and its controls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.nightly.distributed.stops import GRACE_S, LIMIT_S, Trial, check, try_once

PATIENCE_S = 20.0  # other tests may run at the same time; the campaign has a machine to itself and allows GRACE_S


@pytest.mark.parametrize("what", ["save", "restore"])
@pytest.mark.parametrize("name", ["SIGSTOP", "SIGKILL"])
def test_lost_process_is_named_and_job_resumes(tmp_path: Path, what: str, name: str) -> None:
    chance = random.Random(f"{what} {name}")
    trial = Trial(what, name, chance.randrange(1, 4))
    while not try_once(tmp_path / "run", trial, chance, PATIENCE_S):
        pass
    print(trial)


def trial_of(victim: int) -> Trial:
    return Trial("save", "SIGSTOP", victim, at=3, of=17)


def test_check_detects_late_or_wrong_reports() -> None:
    named = {"value": {"at": 105.0, "error": "CheckpointTimeoutError: ...: process 2 of 4 did not arrive for 6 s"}}
    check(trial_of(2), 0, named, 100.0, GRACE_S)
    with pytest.raises(AssertionError, match="process 1"):
        check(trial_of(1), 0, named, 100.0, GRACE_S)
    with pytest.raises(AssertionError, match="was late"):
        check(trial_of(2), 0, named, 105.0 - LIMIT_S - GRACE_S - 0.1, GRACE_S)
    with pytest.raises(AssertionError, match="left with -6"):
        check(trial_of(2), 0, {"error": "left with -6"}, 100.0, GRACE_S)
    check(trial_of(0), 3, {"error": "JAX distributed service detected fatal errors"}, 100.0, GRACE_S)
