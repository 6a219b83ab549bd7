"""Starts Python processes that have imported jax before they begin: each is a fork of one that has done nothing else.

To import jax, this package and what tests import takes seconds of a processor, and tests start hundreds of processes.
What is forked has one thread of Python, no devices, and no answer yet to what is asked once a process. It is not for
tests of what is imported, of how much memory a process takes, or of variables that Python itself or the linker reads.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.paths import REPO_ROOT

MOST_BYTES = 1 << 17  # of what one is told
IMPORTED = ("jax.numpy", "jax.experimental.multihost_utils", "pytest", "hypothesis", "jaxckpt_train.callback")
READ_BEFORE = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "COVERAGE_")  # by whom no fork asks again
NOT_READ = ("PYTHONPATH", "PYTHONUNBUFFERED")  # or heeded here


class WarmProcess:
    """What is needed of `subprocess.Popen`, with text in all pipes.

    Args:
        command: what follows the interpreter: `-u` or nothing, `-c`, `-m` or a file, and its arguments.
        environment: all variables. Those that jax reads when it is imported are heeded.
        cwd: where it runs; None: in the root of the repository.
        stdin, stdout, stderr: a pipe, or a file that it gets as its own.
        source: which of the processes it is forked from. Those forked from one have the same seed of hashes.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        environment: Mapping[str, str],
        *,
        cwd: Path | None = None,
        stdin: int = subprocess.PIPE,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        source: int = 0,
    ) -> None:
        assert is_alike(environment), "it has variables that are read before a fork begins: it needs a fresh process"
        self.args = [*map(os.fspath, command)]
        self.returncode: int | None = None
        self._source = _source(source)
        told = {"command": self.args, "environment": {**environment}, "cwd": str(cwd or REPO_ROOT)}
        ours, theirs = zip(*map(_end, (stdin, stdout, stderr), (True, False, False)), strict=True)
        try:
            self.pid = self._source.ask(told, theirs)
        finally:
            for given, each in zip((stdin, stdout, stderr), theirs, strict=True):
                if each != given:
                    os.close(each)
        self.stdin: IO[str] | None = ours[0]
        self.stdout: IO[str] | None = ours[1]
        self.stderr: IO[str] | None = ours[2]
        self._ends = os.pidfd_open(self.pid)  # not waited for by anybody else, so the number is its own

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._source.ask({"ended": self.pid}, []))
            os.close(self._ends)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self.returncode is None:
            self.wait_until_zombie(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def wait_until_zombie(self, timeout: float | None = None) -> None:
        """Wait until it has ended, and let nobody ask for its exit code yet."""
        select.select([self._ends], [], [], timeout)

    def send_signal(self, number: int) -> None:
        """Send it a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str | os.PathLike[str]],
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run one without input, and come back with its exit code and all that it printed.

    Raises:
        subprocess.TimeoutExpired: it ran for longer, and was killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
        streams = {"stdin": nothing.fileno(), "stdout": output.fileno(), "stderr": errors.fileno()}
        process = WarmProcess(command, environment, cwd=cwd, **streams)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read(), errors.read())


def is_alike(environment: Mapping[str, str]) -> bool:
    """Whether the variables that are read before a fork begins are those of this process."""
    mine, theirs = (
        {name: value for name, value in each.items() if name.startswith(READ_BEFORE) and name not in NOT_READ}
        for each in (os.environ, environment)
    )
    return mine == theirs


def _end(given: int, is_read: bool) -> tuple[IO[str] | None, int]:
    """Of a stream: our end if it is a pipe, and the file that the process gets."""
    if given != subprocess.PIPE:
        return None, given
    reading, writing = os.pipe()
    return (open(writing, "w"), reading) if is_read else (open(reading), writing)


class _Source:
    """The process that others are forked from, which is also their parent."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_python", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_NUM_CPU_DEVICES": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=REPO_ROOT,
            )

    def ask(self, told: dict[str, Any], files: Sequence[int]) -> int:
        """The number that answers it."""
        with self._one_at_a_time:
            socket.send_fds(self._ours, [json.dumps(told).encode()], files)
            answer = self._ours.recv(100)
        assert answer, f"the process that others are forked from has left with {self._process.wait(10)}"
        return int(answer)

    def end(self) -> None:
        """Let it go."""
        self._ours.close()
        self._process.wait(30)


@functools.cache
def _source(number: int) -> _Source:
    source = _Source()
    atexit.register(source.end)
    return source


def _forked(connection: socket.socket) -> dict[str, Any]:
    """What to run: answers whoever asks, and comes back in a new process only."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        told: dict[str, Any] = json.loads(message)
        if "ended" in told:
            _, status = os.waitpid(told["ended"], 0)
            connection.send(str(status).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
        for file in files:
            os.close(file)
        if pid == 0:
            return told
        connection.send(str(pid).encode())


def _heed(environment: Mapping[str, str]) -> None:
    """What Python and jax do about variables when they begin."""
    before = {**os.environ}
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    config = sys.modules["jax"].config
    for name, text in environment.items():
        if name.startswith("JAX_") and text != before.get(name):
            kind = type(getattr(config, name.lower()))
            value = text.lower() in ("1", "true", "yes", "on") if kind is bool else text
            config.update(name.lower(), kind(value) if kind in (int, float) else value)


def _run_as_main(command: Sequence[str]) -> None:
    """As the interpreter would."""
    if command[0] == "-u":
        sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)  # noqa: SIM115
        command = command[1:]
    how, *arguments = command
    if how == "-m":
        sys.argv = arguments
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if how == "-c":
        text, name, sys.path[0] = arguments[0], "<string>", ""
        sys.argv = ["-c", *arguments[1:]]
    else:
        text, name, sys.path[0] = Path(how).read_text(encoding="utf-8"), how, os.path.dirname(how)
        main.__file__ = how
        sys.argv = [how, *arguments]
    exec(compile(text, name, "exec"), main.__dict__)  # what a test is about


def main() -> None:
    """Import what most need, then be forked; a new process runs what it is told to, as Python would."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in IMPORTED:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()
    told = _forked(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(told["cwd"])
    _heed(told["environment"])
    _run_as_main(told["command"])


if __name__ == "__main__":
    main()
