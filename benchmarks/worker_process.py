"""A worker as its parent sees it: started, asked, stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.registry import TORCH_PYTHON, entry_of
from benchmarks.sample import LoadSample, SaveSample
from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
ANSWER_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 16
LOG_TAIL_CHARACTERS = 2000


class WorkerError(Exception):
    """A worker answered with an error, died, or did not answer in time."""


class Worker:
    """A started worker; `ready` has to be the first that is asked of it.

    Args:
        subject: whose turns it takes.
        workload: what with.
        log: gets what it prints, after what is there.
        member: for one of a job: the arguments of `jax.distributed.initialize`.
    """

    def __init__(self, subject: str, workload: Workload, log: Path, member: Mapping[str, Any] | None = None) -> None:
        self._log = log
        as_member = ["--job", json.dumps(member)] if member else []
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(interpreter(subject)), "-m", "benchmarks.worker", "--subject", subject, *as_member],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment(workload),
            )
        self._send({"workload": dataclasses.asdict(workload)})

    def ready(self) -> dict[str, str | None]:
        """Wait until its libraries are imported; several workers may be started before the first is waited for.

        Returns:
            The versions of its interpreter and of the packages that its figures depend on.
        """
        return self._answer()

    def save(self, path: Path, seed: Sequence[int]) -> SaveSample:
        """See `Turns.save`."""
        return SaveSample.from_json(self._ask({"do": "save", "path": str(path), "seed": seed}))

    def load(self, path: Path, seed: Sequence[int], target: str) -> list[LoadSample]:
        """See `Turns.load`."""
        samples = self._ask({"do": "load", "path": str(path), "seed": seed, "target": target})
        return [LoadSample.from_json(sample) for sample in samples]

    def end_input(self) -> None:
        """Have it leave."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Do not let it go on; `stop` is still to be called."""
        self._process.kill()

    def stop(self) -> None:
        """End its input and wait for it; kill it if it does not leave."""
        self.end_input()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        self._send(request)
        return self._answer()

    def _send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: reading its answer will say so
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Any:
        try:
            answer = json.loads(self._line())
        except EOFError as error:
            raise WorkerError(f"the worker died: {self._last_words()}") from error
        except TimeoutError as error:
            self._process.kill()
            raise WorkerError(f"no answer in {ANSWER_TIMEOUT_S:.0f} s") from error
        if "error" in answer:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(answer["traceback"])
            raise WorkerError(answer["error"])
        return answer["ok"]

    def _line(self) -> bytes:
        """One line of its output; it never writes more than the answer to what it was asked."""
        line, until = b"", time.monotonic() + ANSWER_TIMEOUT_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(self._process.stdout.fileno(), CHUNK_BYTES)
            if not chunk:
                raise EOFError
            line += chunk
        return line

    def _last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:].strip()


def interpreter(subject: str) -> Path:
    """The Python that a subject runs in."""
    entry = entry_of(subject)
    return TORCH_PYTHON if entry and entry.torch else Path(sys.executable)


def environment(workload: Workload) -> dict[str, str]:
    """The environment of a worker: JAX on the CPU, with as many devices as the workload wants."""
    devices = workload.devices // workload.processes
    flags = f"--xla_force_host_platform_device_count={devices}" if workload.mesh else ""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
