"""Commands whose output is closed, full, or read only in part, and interrupts of a command."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.conftest import REPO_ROOT
from tests.support.commands import ended, run
from tests.support.runs import made_run, remove_the_manifest, step_path
from tests.support.tiers import nightly_after


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a copy of it whose newest step is damaged, and two checkpoints that differ in many leaves."""
    made = tmp_path_factory.mktemp("streams")
    made_run(made / "run", 1, 2)
    remove_the_manifest(step_path(made_run(made / "damaged", 1, 2), 2))
    for name, value in (("a", 0.0), ("b", 1.0)):
        jct.save(made / name, {f"leaf-{number:05d}": np.full(1, value) for number in range(1500)})
    return made


def shell(folder: Path, arguments: str, around: str) -> tuple[int, str, str]:
    """Run a command in a shell, in place of the %s in `around`."""
    return ended(["bash", "-c", around % f"{shlex.quote(sys.executable)} -m jaxckpt_train.cli {arguments}"], folder)


@pytest.mark.parametrize(
    ("arguments", "code", "reader"),
    nightly_after(
        4,
        [
            ("diff a b", 1, "true"),
            ("diff a b --json", 1, "head -1"),
            ("ls damaged", 1, "true"),
            ("--help", 0, "head -1"),
            ("diff a b", 1, "head -1"),
            ("diff a b --json", 1, "true"),
            ("ls damaged", 1, "head -1"),
            ("--help", 0, "true"),
            *itertools.product(["show a", "diff -h"], [0], ["true", "head -1"]),
        ],
    ),
)
def test_reader_that_stops_changes_no_exit_code(folder: Path, arguments: str, code: int, reader: str) -> None:
    found = shell(folder, arguments, f"set -o pipefail; %s | {reader}")
    assert (found[0], found[2]) == (code, "")


@pytest.mark.parametrize(
    "arguments", nightly_after(2, ["verify run", "--help", "ls run", "show a", "verify run --json", "--version"])
)
def test_closed_output_keeps_exit_code_0(folder: Path, arguments: str) -> None:
    assert shell(folder, arguments, "%s >&-") == (0, "", "")
    assert shell(folder, arguments, "%s >&- 2>&- <&-") == (0, "", "")


@pytest.mark.parametrize("streams", nightly_after(2, ["2>&-", "2>/dev/full", ">&- 2>&-", "2> >(true)"]))
def test_closed_error_output_keeps_the_exit_code(folder: Path, streams: str) -> None:
    code, output, _ = shell(folder, "verify run", f"%s {streams}")
    assert (code, ": ok, " in output) == (0, ">&- 2" not in streams)
    assert shell(folder, "verify none", f"%s {streams}")[:2] == (3, "")
    assert shell(folder, "ls --none", f"%s {streams}")[:2] == (2, "")


def test_closed_stream_number_is_not_reused(folder: Path, tmp_path: Path) -> None:
    assert shell(folder, f"cp a {tmp_path}/copy", "%s >&- 2>&- <&-")[0] == 0
    assert jct.verify(tmp_path / "copy").ok


@pytest.mark.parametrize(
    "arguments", nightly_after(3, ["verify run", "diff a b", "--help", "ls run", "show a", "ls run --json"])
)
def test_full_output_exits_with_4(folder: Path, arguments: str) -> None:
    code, _, error = shell(folder, arguments, "%s >/dev/full")
    assert code == 4
    assert error.startswith("jaxckpt: standard output: ")
    assert "No space left on device" in error
    assert error.endswith(f" {int(arguments == 'diff a b')}\n")
    assert error.count("\n") == 1


def test_full_output_does_not_stop_the_copy(folder: Path, tmp_path: Path) -> None:
    assert shell(folder, f"cp a {tmp_path}/copy", "%s >/dev/full")[0] == 4
    assert jct.verify(tmp_path / "copy").ok


def test_a_warning_is_one_line(folder: Path) -> None:
    code, output, error = shell(folder, "verify damaged", "%s")
    assert code == 1
    assert f"{step_path(folder / 'damaged', 1)}: ok" in output
    assert error.startswith(f"jaxckpt: {step_path(folder / 'damaged', 2)} is skipped: ")
    assert error.count("\n") == 1


def test_wrong_call_is_reported_as_json(folder: Path) -> None:
    for arguments in (["ls"], ["ls", "run", "--none"], ["none"], ["show", "a", "--step", "x"], ["--none", "ls"]):
        done = run(*arguments, "--json")
        found = json.loads(done.stdout)
        assert (done.exit_code, found["exit_code"], found["error"], done.stderr) == (2, 2, "UsageError", "")
        assert found["message"]
        assert found["notes"] == []
    assert json.loads(shell(folder, "ls --json", "%s")[1])["exit_code"] == 2
    done = run("ls", "run", "--none", "--", "--json")
    assert done.stdout == ""
    assert "Usage:" in done.stderr


INTERRUPTED = """
import signal, sys
from jaxckpt_train.cli import __main__ as start
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "jaxckpt_train.cli.main":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
start.main()
"""


def test_interrupt_during_import_exits_with_130(folder: Path, run_python) -> None:
    done = run_python(INTERRUPTED, "ls", "run", cwd=folder, fresh=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


PRINTS_WHEN_IT_WAITS = """
from jaxckpt_train.cli import __main__ as start
from jaxckpt_train.cli import maintain

wait = maintain.time.sleep

def print_and_wait(seconds):
    print("waits", flush=True)
    wait(seconds)

maintain.time.sleep = print_and_wait
start.main()
"""


def test_interrupt_of_scrub_exits_with_130(folder: Path) -> None:
    command = [sys.executable, "-c", PRINTS_WHEN_IT_WAITS, "scrub", str(folder / "run"), "--mib-per-second", "0.00001"]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"  # between two reads, to keep its rate
        process.send_signal(2)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, b"")


IN_A_PROGRAM = """
import contextlib, io, logging, os, sys, threading
from jaxckpt_train.cli import __main__ as start
before, handlers = (sys.stdout, sys.stderr), list(logging.getLogger("jaxckpt_train").handlers)
codes = []

def call():
    try:
        start.main()
    except SystemExit as ended:
        codes.append(ended.code)

call()
kept = io.StringIO()
with contextlib.redirect_stdout(kept):
    call()
thread = threading.Thread(target=call)
thread.start()
thread.join()
assert (sys.stdout, sys.stderr) == before
assert logging.getLogger("jaxckpt_train").handlers == handlers
print(codes, kept.getvalue().count("step-0000000001"))
"""


def test_calling_program_keeps_its_streams(folder: Path, run_python) -> None:
    done = run_python(IN_A_PROGRAM, "verify", "damaged", cwd=folder)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [("ok" in line) for line in lines] == [True, True, False]
    assert lines[-1] == "[1, 1, 1] 1"
    assert done.stderr.count("is skipped") == 3


def test_nonblocking_pipe_gets_the_whole_output(folder: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-m", "jaxckpt_train.cli", "diff", "a", "b", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        with open(reading, "rb") as pipe:
            found = json.loads(pipe.read())
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert (process.returncode, len(found["differences"])) == (1, 1500)


def test_nonblocking_pipe_stays_so_for_others(folder: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-m", "jaxckpt_train.cli", "--version"]
    subprocess.run(command, stdout=writing, check=True, env={**os.environ, "PYTHONPATH": str(REPO_ROOT)})
    assert not os.get_blocking(writing)
    os.close(reading)
    os.close(writing)


def test_warnings_in_json_are_not_printed(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    with (directory / "history.jsonl").open("ab") as file:
        file.write(b"\xff\n" * 3)
    code, output, error = shell(tmp_path, "report run --json", "%s")
    assert (code, error) == (0, "")
    assert len(json.loads(output)["warnings"]) == 3
