"""Targets of a proof: those that a new process cannot run are refused."""

from __future__ import annotations

import functools
import inspect
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
        (local(), "define it at the top level.* functools.partial"),
        (lambda directory: None, "define it at the top level"),
        (wrapped, "not decorated"),
        (Holder(), "expected a function, or a script"),
        ("train.py", "expected a function, .* found 'train.py'"),
        ([], "a Python script, or -m and the name of a module"),
        (["train.py", 3], "a list of strings"),
        (["no_such.py", "{directory}"], "a Python script, or -m .*no_such.py"),
        (["-m"], "a Python script, or -m and the name of a module"),
        (["-m", "x", "--to", "a"], r'"\{directory\}"'),
        (functools.partial(at_the_top, "positional"), "functools.partial\\(function, name=value"),
        (functools.partial(at_the_top, other=1), "unexpected keyword argument 'other'"),
        (functools.partial(at_the_top, word=(1, 2)), "that can be passed to another process"),
        (functools.partial(at_the_top, word=object()), "that can be passed to another process"),
    ],
)
def test_unusable_target_is_refused(make_run: Any, found: str) -> None:
    with pytest.raises(jct.SettingsError, match=f"^resume proof: make_run: .*{found}"):
        target_of(make_run)


def test_function_without_directory_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_the_top, "__signature__", inspect.signature(local), raising=False)
    with pytest.raises(jct.SettingsError, match="a function that accepts a directory"):
        target_of(at_the_top)
