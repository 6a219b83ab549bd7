"""A job of workers, seen by its parent: processes of one `jax.distributed` job that get the same commands."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.job_samples import load_of_job, save_of_job
from benchmarks.loopback import free_address
from benchmarks.sample import LoadSample, SaveSample
from benchmarks.worker_process import Worker
from benchmarks.workloads import Workload

T = TypeVar("T")


class WorkerJob:
    """As a `Worker`: `ready` has to be the first that is asked of it. After an error none of its processes lives."""

    def __init__(self, subject: str, workload: Workload, log: Path) -> None:
        member = {"coordinator_address": free_address(), "num_processes": workload.processes}
        self._workers = [
            Worker(subject, workload, log, member | {"process_id": number}) for number in range(workload.processes)
        ]
        self._pool = concurrent.futures.ThreadPoolExecutor(workload.processes)

    def ready(self) -> dict[str, str | None]:
        """See `Worker.ready`; all have the same versions."""
        return self._all(Worker.ready)[0]

    def save(self, path: Path, seed: Sequence[int]) -> SaveSample:
        """See `Turns.save`; of all processes together."""
        return save_of_job(self._all(lambda worker: worker.save(path, seed)))

    def load(self, path: Path, seed: Sequence[int], target: str) -> list[LoadSample]:
        """See `Turns.load`; of all processes together."""
        samples = self._all(lambda worker: worker.load(path, seed, target))
        return [load_of_job(row) for row in zip(*samples, strict=True)]

    def stop(self) -> None:
        """Have all leave, which they do together, and wait for them."""
        for worker in self._workers:
            worker.end_input()
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown()

    def _all(self, ask: Callable[[Worker], T]) -> list[T]:
        """What all answer, in order; if one fails, the others would wait for it for long."""
        asked = [self._pool.submit(ask, worker) for worker in self._workers]
        done, waiting = concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_EXCEPTION)
        first = next((answer.exception() for answer in asked if answer in done and answer.exception()), None)
        if first is not None:
            for worker in self._workers:
                worker.kill()
            concurrent.futures.wait(waiting)
            raise first
        return [answer.result() for answer in asked]
