"""Runs that cannot be compared: each is reported with its reason."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.testing import ResumeNotProvenError, assert_resume_exact
from tests.support.faulty_runs import train
from tests.support.in_one_process import prove_here


@pytest.mark.parametrize(
    ("fault", "kill_at", "text"),
    [
        ("no save", 3, "started from the beginning .* no step was saved .* update 3"),
        ("", 7, "never reached update 7"),
        ("error caught", 3, "continued after the error .* update 3, to update 6"),
        ("switched off", 3, "ended without reporting an update"),
        ("another place", 3, "saves to .*/elsewhere: expected"),
        ("a new place each time", 3, "started from the beginning in .*/run-1: .* saved in .*/run-0 "),
        ("no resume", 3, "called ckpt.resume 0 times"),
        ("two loops", 3, "called ckpt.resume 2 times"),
    ],
)
def test_run_that_cannot_be_compared_is_reported(fault: str, kill_at: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(ResumeNotProvenError, match=text):
        prove_here(functools.partial(train, fault=fault), tmp_path / "proof", kill_at)


def test_resume_with_nothing_left_to_do_proves_nothing(tmp_path: Path) -> None:
    def shorter_once_resumed(directory: Path) -> None:
        train(directory, updates=2 if list(directory.iterdir()) else 6)

    with pytest.raises(ResumeNotProvenError, match=r"process 2 .resumed at 2. ended without reporting an update"):
        prove_here(shorter_once_resumed, tmp_path / "proof", 3)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"kill_at": 0}, "kill_at: expected .*, found 0"),
        ({"kill_at": []}, r"kill_at: expected .*, found \[\]"),
        ({"kill_at": [5, 3]}, r"in ascending order, found \[5, 3\]"),
        ({"kill_at": [3, 3]}, r"in ascending order, found \[3, 3\]"),
        ({"kill_at": "3"}, "kill_at: expected .*, found '3'"),
        ({"kill_at": 3, "how": "term"}, "how: expected one of .*, found 'term'"),
        ({"kill_at": 3, "timeout_s": 0}, "timeout_s: expected .*, found 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(more: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(jct.SettingsError, match=f"^resume proof: .*{text}"):
        assert_resume_exact(train, directory=tmp_path, **more)
    assert list(tmp_path.iterdir()) == []
