"""Run a command of `jaxckpt` in this process, and return its output and exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner, Result

from jaxckpt_train.cli.main import app
from tests.conftest import REPO_ROOT

# A program that owns the run of its argument until its input ends.
OWNER = """
import sys
import jaxckpt_train as jct
with jct.StepManager(sys.argv[1]) as manager:
    manager.own()
    print("owned")
    sys.stdin.readline()
"""
# One call of each command, in a folder with the run `run`.
CALLS = {
    "--help": ["--help"],
    "ls": ["ls", "run"],
    "show": ["show", "run"],
    "stats": ["stats", "run"],
    "diff": ["diff", "run", "run"],
    "verify": ["verify", "run"],
    "scrub": ["scrub", "run"],
    "prune": ["prune", "run", "--keep-latest", "2"],
    "prune --yes": ["prune", "run", "--keep-latest", "2", "--yes"],
    "pin": ["pin", "run", "2"],
    "cp": ["cp", "run", "copy", "--overwrite"],
    "mv": ["mv", "copy", "moved", "--overwrite"],
    "import": ["import", "run", "imported", "--only", "w"],
    "doctor": ["doctor", "run", "--size-mib", "1"],
}
DIFFERENT = re.compile(
    r"\d+ s ago|(?<=\.tmp-)[0-9a-f-]+|(?<=/data-)[0-9a-f]+"
)  # in two calls: the time, and the names of attempts


def all_commands() -> dict[str, Any]:
    """Return the commands of typer by name."""
    group: Any = get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


def run(*arguments: str | int | os.PathLike[str]) -> Result:
    """Run a command; raise an error that the command does not handle."""
    done = CliRunner().invoke(
        app, [os.fspath(each) if isinstance(each, os.PathLike) else str(each) for each in arguments]
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def ended(words: Sequence[str], cwd: str | os.PathLike[str] | None = None) -> tuple[int, str, str]:
    """Run a process that can import this package; return its exit code, output and errors."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def printed(*arguments: str | int | os.PathLike[str], code: int = 0) -> str:
    """Return the output of a command that exits with this code."""
    done = run(*arguments)
    assert done.exit_code == code, done.output
    return done.stdout


def json_of(*arguments: str | int | os.PathLike[str], code: int = 0) -> dict[str, Any]:
    """Return the JSON document of a command that exits with this code."""
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refused(*arguments: str | int | os.PathLike[str], code: int) -> str:
    """Return the error line of a command that exits with this code; check that its JSON has the same message."""
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    begin, _, message = done.stderr.partition("jaxckpt: ")
    assert begin == ""
    assert message.endswith("\n")
    as_json = json_of(*arguments, code=code)
    assert set(as_json) == {"error", "message", "notes", "exit_code"}
    assert as_json["exit_code"] == code
    again = "\n".join([as_json["message"], *as_json["notes"], ""])
    assert DIFFERENT.sub("", again) == DIFFERENT.sub("", message)
    return message.rstrip("\n")
