"""Starts Python processes that have imported jax before they begin: each is a fork of one that has done nothing else.

To import jax, this package and what tests import takes seconds of a processor, and the tests of jobs start hundreds of
processes. What is forked has one thread of Python, no devices, and no answer yet to what is asked once a process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPO_ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 1 << 17  # of what one is told
IMPORTED = ("jax.numpy", "jax.experimental.multihost_utils", "pytest", "hypothesis", "jaxckpt_train.callback")


class WarmProcess:
    """What is needed of `subprocess.Popen`, with pipes of text for all three streams.

    Args:
        module: what to run, as by `python -m`.
        arguments: for it.
        environment: all variables. Of those that jax reads when it is imported JAX_NUM_CPU_DEVICES alone is heeded.
        source: which of the processes it is forked from. Those forked from one have the same seed of hashes.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], *, source: int = 0
    ) -> None:
        self._source = _source(source)
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_error, theirs_error = os.pipe()
        told = {"module": module, "arguments": [*arguments], "environment": {**environment}}
        theirs = [theirs_in, theirs_out, theirs_error]
        try:
            self.pid = self._source.ask(told, theirs)
        finally:
            for each in theirs:
                os.close(each)
        self.returncode: int | None = None
        self.stdin: IO[str] = open(ours_in, "w")  # noqa: SIM115
        self.stdout: IO[str] = open(ours_out)  # noqa: SIM115
        self.stderr: IO[str] = open(ours_error)  # noqa: SIM115
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
            select.select([self._ends], [], [], timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class _Source:
    """The process that others are forked from, which is also their parent."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_python", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
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


def main() -> None:
    """Import what most need, then be forked; a new process runs what it is told to, as Python would."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in IMPORTED:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()
    told = _forked(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.modules["jax"].config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", "1")))
    sys.argv = [told["module"], *told["arguments"]]
    runpy.run_module(told["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
