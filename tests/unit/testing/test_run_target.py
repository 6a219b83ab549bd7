"""Targets of a proof: those that a new process cannot run are refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.testing.processes import target_of


def at_the_top(directory: Path, word: str = "default") -> None:
    """A target at the top level."""
    (directory / "ran.txt").write_text(f"{word} {__name__}")


class Holder:
    """A class with a target."""

    @staticmethod
    def inside(directory: Path) -> None:
        at_the_top(directory, "inside")


wrapped = functools.wraps(at_the_top)(lambda directory: None)


def local() -> Any:
    def inner(directory: Path) -> None: ...

    return inner


@pytest.mark.parametrize(
    ("make_run", "found"),
    [
        (local(), "a function at the top level .* functools.partial"),
        (lambda directory: None, "a function at the top level"),
        (wrapped, "a function at the top level"),
        (Holder(), "expected a function, or a script"),
        ("train.py", "expected a function, .* found 'train.py'"),
        ([], r'"\{directory\}"'),
        (["train.py", 3], "a list of strings"),
        (["-m", "x", "--to", "a"], r'"\{directory\}"'),
        (functools.partial(at_the_top, "positional"), "functools.partial\\(it, name=value"),
        (functools.partial(at_the_top, word=(1, 2)), "arguments of None, bool"),
        (functools.partial(at_the_top, word=object()), "arguments of None, bool"),
    ],
)
def test_unusable_target_is_refused(make_run: Any, found: str) -> None:
    with pytest.raises(jct.SettingsError, match=f"^resume proof: make_run: .*{found}"):
        target_of(make_run)
