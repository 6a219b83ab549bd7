"""Evaluations between two updates, in processes that are really killed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from jaxckpt_train.testing import ResumeNotExactError, assert_resume_exact
from jaxckpt_train.testing.processes import How
from tests.support.evaluations import CHANGES, counts


@pytest.mark.parametrize("how", ["kill", "preempt"])
def test_killed_process_resumes_right_before_evaluation(how: How, tmp_path: Path) -> None:
    proof = assert_resume_exact(functools.partial(counts, place="top"), kill_at=2, how=how)
    assert (proof.interrupted_in, proof.resumed_at) == ((2, 4), (1 if how == "kill" else 2, 4))
    with pytest.raises(ResumeNotExactError, match=r"update 5: meter/count differs") as caught:
        assert_resume_exact(counts, kill_at=2, how=how, directory=tmp_path / "proof")
    assert caught.value.causes[0] == CHANGES
