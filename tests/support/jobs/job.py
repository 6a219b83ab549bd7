"""A real job: processes that join through jax.distributed on loopback and call functions of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.loopback import free_address
from tests.support.jobs.namespaces import address as namespace_address
from tests.support.paths import REPO_ROOT
from tests.support.warm_python import WarmProcess

START_S, CALL_S = 120.0, 120.0


class Job:
    """Processes that wait for calls. Each call runs in all of them at once.

    Args:
        processes: their number.
        devices: CPU devices of each.
        namespaces: the network namespace of each; see `namespaces.py`.
        more: options of the worker, such as `heartbeat_timeout_seconds=10`.
    """

    def __init__(self, processes: int, devices: int = 1, namespaces: Sequence[str] | None = None, **more: Any) -> None:
        self.processes = processes
        host, _, port = free_address().rpartition(":")
        coordinator = f"{host if namespaces is None else namespace_address(0)}:{port}"
        self.workers = [
            _Worker(coordinator, number, processes, devices, {**more, "namespace": namespaces and namespaces[number]})
            for number in range(processes)
        ]
        self._pool = ThreadPoolExecutor(processes)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Call a function of a test module in each process; return the results in order. All values are JSON.

        Raises:
            AssertionError: it raised in a process; the job cannot be used again.
        """
        answers = self.outcomes(function, *arguments, timeout_s=timeout_s)
        failed = [f"process {number}: {each['error']}" for number, each in enumerate(answers) if "error" in each]
        if failed:
            self.end()
            raise AssertionError("\n".join(failed))
        return [each["value"] for each in answers]

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = CALL_S,
        of: Sequence[int] | None = None,
        heard: Sequence[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Like `call`, but return `{"value": ...}` or `{"error": text}` for each process.

        `of`: only these processes are called; `heard`: only these answers are awaited, the others never come.
        """
        chosen = range(self.processes) if of is None else of
        request = json.dumps({"call": f"{function.__module__}:{function.__qualname__}", "arguments": arguments})
        for number in chosen:
            self.workers[number].send(request)
        end = time.monotonic() + timeout_s
        return list(self._pool.map(lambda number: self.workers[number].answer(end), heard or chosen))

    def end(self) -> None:
        """Kill all processes."""
        for worker in self.workers:
            worker.kill()
        self._pool.shutdown()

    def is_silent(self, number: int) -> bool:
        """Return whether a process is alive and has reported no error."""
        worker = self.workers[number]
        return worker.process.poll() is None and "Error" not in worker.stderr()

    def is_alive(self) -> bool:
        """Return whether all processes are alive."""
        return all(worker.process.poll() is None for worker in self.workers)


class _Worker:
    def __init__(self, address: str, number: int, processes: int, devices: int, more: dict[str, Any]) -> None:
        self._number = number
        variables = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}
        options = json.dumps({"coordinator_address": address, "num_processes": processes, "process_id": number, **more})
        # Two sources have different hash seeds, so that sets of neighbouring processes differ in their order.
        self.process = WarmProcess(["-m", "tests.support.jobs.worker", options], variables, source=number % 2)
        self._lines: list[str] = []
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()

    def _drain(self) -> None:
        with self.process.stderr as lines:
            self._lines.extend(lines)

    def stderr(self) -> str:
        return "".join(self._lines)

    def send(self, request: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()

    def answer(self, end: float) -> dict[str, Any]:
        """Return its answer; kill a process that does not answer in time, and show the stacks of its threads."""
        late = threading.Timer(max(0.0, end - time.monotonic()), self._give_up)
        late.start()
        try:
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            self.process.wait(10)
            return {"error": f"left with {self.process.returncode}\n{self.stderr()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _give_up(self) -> None:
        self.process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._drainer.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def running(processes: int, devices: int = 1, **more: Any) -> Iterator[Job]:
    """Start a job, and end it afterwards."""
    job = Job(processes, devices, **more)
    try:
        yield job
    finally:
        job.end()
