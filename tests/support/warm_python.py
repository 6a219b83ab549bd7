"""Start Python processes that have imported jax already: each is a fork of a process that only did its imports.

Importing jax, this package and common modules takes seconds of processor time, and tests start hundreds of processes.
A fork has one Python thread, no devices, and no cached values of the process. It is not suited for tests of imports, of
the memory of a process, or of variables that Python itself or the linker reads.
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

MOST_BYTES = 1 << 17  # of one request
IMPORTED = ("jax.numpy", "jax.experimental.multihost_utils", "pytest", "hypothesis", "jaxckpt_train.callback")
READ_BEFORE = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "COVERAGE_")  # variables that a fork does not read again
NOT_READ = ("PYTHONPATH", "PYTHONUNBUFFERED")  # or applied here


class WarmProcess:
    """The part of `subprocess.Popen` that tests need, with text in all pipes.

    Args:
        command: the arguments of the interpreter: an optional `-u`, then `-c`, `-m` or a file, and its arguments.
        environment: all variables. Those that jax reads at its import are applied.
        cwd: its working directory; None: the root of the repository.
        stdin, stdout, stderr: a pipe, or a file for the process.
        source: the number of the process to fork from. All forks of one have the same hash seed.
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
        assert is_alike(environment), "a variable is read before the fork: use a fresh process"
        self.args = [*map(os.fspath, command)]
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        self._source = _source(source)
        request = {"command": self.args, "environment": {**environment}, "cwd": str(cwd or REPO_ROOT)}
        ours, theirs = zip(*map(_end, (stdin, stdout, stderr), (True, False, False)), strict=True)
        try:
            self.pid = self._source.ask(request, theirs)
        finally:
            for given, each in zip((stdin, stdout, stderr), theirs, strict=True):
                if each != given:
                    os.close(each)
        self.stdin: IO[str] | None = ours[0]
        self.stdout: IO[str] | None = ours[1]
        self.stderr: IO[str] | None = ours[2]
        self._ends = os.pidfd_open(self.pid)  # only this object waits for it, so the number stays valid

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        with self._reaping:  # several threads may ask
            if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
                self.returncode = os.waitstatus_to_exitcode(self._source.ask({"ended": self.pid}, []))
                os.close(self._ends)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        if self.returncode is None:
            self.wait_until_zombie(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def wait_until_zombie(self, timeout: float | None = None) -> None:
        """Wait for its end without reaping it."""
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
    """Run a process without input, and return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: it ran longer and was killed.
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
    """Return whether the variables that are read before a fork equal those of this process."""
    mine, theirs = (
        {name: value for name, value in each.items() if name.startswith(READ_BEFORE) and name not in NOT_READ}
        for each in (os.environ, environment)
    )
    return mine == theirs


def _end(given: int, is_read: bool) -> tuple[IO[str] | None, int]:
    """Return our end of a stream if it is a pipe, and the file for the process."""
    if given != subprocess.PIPE:
        return None, given
    reading, writing = os.pipe()
    return (open(writing, "w"), reading) if is_read else (open(reading), writing)


class _Source:
    """The process from which others are forked; it is also their parent."""

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

    def ask(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """Return the number in the answer to a request."""
        with self._one_at_a_time:
            socket.send_fds(self._ours, [json.dumps(request).encode()], files)
            answer = self._ours.recv(100)
        assert answer, f"the source of forks exited with {self._process.wait(10)}"
        return int(answer)

    def end(self) -> None:
        """End it."""
        self._ours.close()
        self._process.wait(30)


@functools.cache
def _source(number: int) -> _Source:
    source = _Source()
    atexit.register(source.end)
    return source


def _forked(connection: socket.socket) -> dict[str, Any]:
    """Serve requests; return the request to run, in a new process only."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        request: dict[str, Any] = json.loads(message)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
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
            return request
        connection.send(str(pid).encode())


def _apply(environment: Mapping[str, str]) -> None:
    """Apply variables as Python and jax do at their start."""
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
    """Run a command as the interpreter does."""
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
    exec(compile(text, name, "exec"), main.__dict__)  # the program of a test


def main() -> None:
    """Import common modules and serve forks; a new process runs its command as Python does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in IMPORTED:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()
    request = _forked(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    _apply(request["environment"])
    _run_as_main(request["command"])


if __name__ == "__main__":
    main()
