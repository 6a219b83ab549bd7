"""Commands on pages name targets, modules, options, extras, presets and keys that exist."""

from __future__ import annotations

import pytest

from tests.support.page_commands import commands, problems
from tests.support.pages import Page, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_name_what_there_is(page: Page) -> None:
    assert {command: found for command in commands(page) if (found := problems(command))} == {}


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make tests", "no target tests"),
        ('pip install ".[all,docs,none]"', "no extra none"),
        ("python train.py checkpoint=cheapest", "no preset cheapest"),
        ("python train.py checkpoint.save_interval=5", "no key checkpoint.save_interval"),
        ("checkpoint.store.threads=4", "no key checkpoint.store.threads"),
        ("python -m benchmarks.runs", "no benchmarks/runs.py"),
        (".venv/bin/python -m benchmarks.run --quicker", "benchmarks/run.py has no option --quicker"),
        ("python examples/train.py steps=3", "no examples/train.py"),
    ],
)
def test_missing_names_are_found(command: str, problem: str) -> None:
    assert problems(command) == [problem]


def test_commands_are_found_in_blocks_and_in_text() -> None:
    shell, python = "```\nmake c  # and make d\nno command\n```\n", "```python\nmake = e\n```\n"
    text = "Run `make a`, or set `checkpoint.b=1`.\n" + shell + python
    assert list(commands(Page("page.md", text))) == ["make c  # and make d", "make a", "checkpoint.b=1"]
