"""Rounds: every subject in turn saves and loads a new tree, round after round."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import page_cache
from benchmarks.job_process import WorkerJob
from benchmarks.raw_disk import NAME as RAW
from benchmarks.record import WARM_UP_ROUND, Turn
from benchmarks.sample import LoadSample
from benchmarks.worker_process import Worker, WorkerError
from benchmarks.workloads import Workload

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How rounds are run.

    Attributes:
        counted_rounds: rounds after the warm-up.
        seed: of the random bytes, which differ in every turn.
        fresh_loads: every load in a new process, in which nothing is warm.
        report: called with a line of text after every turn.
    """

    counted_rounds: int
    seed: int
    fresh_loads: bool
    report: Report


@dataclasses.dataclass(frozen=True)
class SaveFuture:
    """What the rounds of one workload gave.

    Attributes:
        turns: in the order in which they were taken.
        versions: of what the subjects are made of; where two differ, "name (subject)".
        failed: subject -> what went wrong. It has no turns after that, and those before are left out.
    """

    turns: list[Turn]
    versions: dict[str, str | None]
    failed: dict[str, str]


def run_rounds(workload: Workload, subjects: Sequence[str], directory: Path, plan: Plan) -> SaveFuture:
    """One warm-up round and `plan.counted_rounds` more.

    Every subject has one worker for all rounds, and only one worker has anything to do at a time.

    Args:
        workload: what is saved.
        subjects: names, see `registry.make_turns`.
        directory: an existing directory in which each turn has a new one of its own, deleted after the turn.
        plan: how.
    """
    turns: list[Turn] = []
    failed: dict[str, str] = {}

    def fail(name: str, error: WorkerError) -> None:
        failed[name] = str(error)
        plan.report(f"FAILED: {name}: {error}")

    with contextlib.ExitStack() as stack:
        workers = {name: start(name, workload, directory / f"{_plain(name)}.log") for name in subjects}
        for running in workers.values():
            stack.callback(running.stop)
        versions = _versions(workers, fail)
        for number in range(plan.counted_rounds + 1):
            for index in turn_order(len(subjects), number, plan.seed):
                name = subjects[index]
                if name in failed:
                    continue
                seed = (plan.seed, zlib.crc32(workload.name.encode()), number, index)
                try:
                    turns.append(_take_turn(directory, workload, workers[name], name, number, seed, plan.fresh_loads))
                except WorkerError as error:
                    fail(name, error)
                else:
                    plan.report(_line(workload.name, turns[-1]))
    return SaveFuture([turn for turn in turns if turn.subject not in failed], versions, failed)


def start(name: str, workload: Workload, log: Path) -> Worker | WorkerJob:
    """A worker, or where the workload wants a job, a job of workers; the disk has no use for several."""
    return Worker(name, workload, log) if workload.processes == 1 or name == RAW else WorkerJob(name, workload, log)


@contextlib.contextmanager
def worker(name: str, workload: Workload, log: Path) -> Iterator[Worker | WorkerJob]:
    """One that is ready, and stopped at the end."""
    running = start(name, workload, log)
    try:
        running.ready()
        yield running
    finally:
        running.stop()


def turn_order(count: int, number: int, seed: int) -> list[int]:
    """Every round has an order of its own, by chance: none has a fixed place, or a fixed forerunner to suffer from."""
    return [int(index) for index in np.random.default_rng((seed, number)).permutation(count)]


def _take_turn(
    directory: Path,
    workload: Workload,
    running: Worker | WorkerJob,
    name: str,
    number: int,
    seed: tuple[int, ...],
    fresh_loads: bool,
) -> Turn:
    path = directory / f"{workload.name}-{number}-{_plain(name)}"
    try:
        save = running.save(path, seed)
        loads: list[LoadSample] = []
        for target in workload.targets:
            if fresh_loads:
                with worker(name, workload, directory / f"{_plain(name)}.log") as fresh:
                    loads += fresh.load(path, seed, target)
            else:
                loads += running.load(path, seed, target)
        return Turn(number, name, save, loads)
    finally:
        if path.exists():
            shutil.rmtree(path)
        page_cache.settle()


def _versions(
    workers: Mapping[str, Worker | WorkerJob], fail: Callable[[str, WorkerError], None]
) -> dict[str, str | None]:
    """Wait until all workers are ready."""
    versions: dict[str, str | None] = {}
    for name, running in workers.items():
        try:
            found = running.ready()
        except WorkerError as error:
            fail(name, error)
            continue
        for package, version in found.items():
            if versions.setdefault(package, version) != version:
                versions[f"{package} ({name})"] = version
    return versions


def _plain(name: str) -> str:
    """A subject's name as a part of a file's."""
    return name.replace(":", "-")


def _line(workload: str, turn: Turn) -> str:
    kind = "warm-up" if turn.round == WARM_UP_ROUND else f"round {turn.round}"
    loads = ", ".join(f"{load.row} {load.target} {load.load_s:.3f} s" for load in turn.loads)
    return f"{workload} {kind} {turn.subject}: save {turn.save.durable_s:.3f} s; load {loads}"
