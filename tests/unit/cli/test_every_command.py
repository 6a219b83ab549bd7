"""Properties of every command of `jaxckpt`: its help, wrong calls and exit codes."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

import pytest

from jaxckpt_train.cli.output import Code, code_of
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, StepNotFoundError
from tests.support.commands import all_commands, run

COMMANDS = all_commands()
every_command = pytest.mark.parametrize("name", sorted(COMMANDS))


def test_commands_are_all_found() -> None:
    assert {"ls", "show", "stats", "diff", "verify", "scrub", "prune", "pin", "cp", "mv", "doctor"} <= set(COMMANDS)


@every_command
def test_help_describes_command_and_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    done = run(name, "--help")
    assert done.exit_code == 0
    assert run(name, "-h").stdout == done.stdout
    first = COMMANDS[name].help.splitlines()[0]
    assert first.endswith(".")
    assert " ".join(first.split()[:4]) in " ".join(done.stdout.split())
    options = [each for each in COMMANDS[name].params if each.name != "help"]
    assert [each.name for each in options if each.param_type_name == "option" and not each.help] == []
    assert all(option in done.stdout for each in options for option in each.opts if option.startswith("--"))
    assert "--json" in done.stdout
    listed = re.search(rf"^\W*{name} +(.*?)\W*$", run("--help").stdout, re.MULTILINE)
    assert listed is not None
    assert f"{listed[1]}." == " ".join(COMMANDS[name].help.split("\n\n")[0].split())


@every_command
def test_wrong_call_exits_with_2_and_usage(name: str) -> None:
    for arguments in ([name], [name, "a", "b", "--no-such-option"]):
        done = run(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Usage:" in done.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == importlib.metadata.version("jaxckpt-train") + "\n"
    assert run("--version", "no-such-command").exit_code == 0


def test_unknown_command_exits_with_2() -> None:
    assert "Commands" in run().output
    assert run("no-such-command").exit_code == 2


def test_every_error_has_a_code() -> None:
    assert code_of(StepNotFoundError("no such step")) is Code.NOTHING
    assert code_of(IncompleteCheckpointError("half of it")) is Code.WRONG
    assert code_of(CorruptCheckpointError("a flipped bit")) is Code.WRONG
    assert code_of(CheckpointError("anything else")) is Code.WRONG
