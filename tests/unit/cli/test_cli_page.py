"""The page about `jaxckpt` documents all commands, their options, their JSON keys and the exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jaxckpt_train.cli.output import Code
from tests.conftest import REPO_ROOT
from tests.support.commands import CALLS, run
from tests.support.runs import made_run
from tests.unit.cli.test_every_command import COMMANDS

PAGE = (REPO_ROOT / "docs" / "reference" / "cli.md").read_text()
SECTIONS = {
    match["name"]: match["text"]
    for match in re.finditer(r"^## `jaxckpt (?P<name>\w+)`\n(?P<text>.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_has_a_complete_section(name: str) -> None:
    text = SECTIONS[name]
    assert f"$ jaxckpt {name} " in text
    options = {option for each in COMMANDS[name].params for option in each.opts if option.startswith("--")}
    common = {"--help", "--json", "--step", "--check"}  # the second part of a switch is named, as --no-check
    assert [option for option in options - common if option not in text and f"--no-{option[2:]}" not in text] == []
    assert re.search(r"[Ee]nds with [0-9]", text) or "exit code" in text
    assert "With `--json`: " in text
    assert f"[`{name}`](#jaxckpt-{name})" in PAGE


def test_page_documents_only_existing_options() -> None:
    assert set(SECTIONS) <= set(COMMANDS)
    for name, text in SECTIONS.items():
        known = {option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts)} | {"--json"}
        examples = "\n".join(line for line in text.splitlines() if line.startswith("$ "))
        assert set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", examples)) <= known, name


def test_keys_of_each_document_are_documented(tmp_path: Path) -> None:
    made_run(tmp_path / "run", 1, 2, 3)
    for calls in CALLS.values():
        name, arguments = (
            calls[0],
            [str(tmp_path / each) if each in ("run", "copy", "moved", "imported") else each for each in calls[1:]],
        )
        if name == "--help":
            continue
        done = run(name, *arguments, "--json")
        documented = SECTIONS[name].partition("With `--json`: ")[2]
        assert [key for key in json.loads(done.stdout) if f"`{key}`" not in documented] == [], name


def test_each_exit_code_is_documented() -> None:
    table = PAGE.partition("## Exit codes")[2].partition("## ")[0]
    assert [int(code) for code in re.findall(r"^\| ([0-9]) \|", table, re.MULTILINE)] == [int(code) for code in Code]
