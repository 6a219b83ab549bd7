"""Rounds: every subject in turn saves and loads a new tree, round after round."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks import page_cache, raw_disk
from benchmarks.sample import Moment, Sample
from benchmarks.subject import Subject
from benchmarks.workloads import Tree, Workload, abstract, check_equal, touch

WARM_UP_ROUND = 0

Measure = Callable[[Path, Tree], Sample]
Report = Callable[[str, int, str, Sample], None]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One subject's turn in one round; round 0 is the warm-up and counts in no summary."""

    round: int
    subject: str
    sample: Sample


def run_rounds(
    workload: Workload,
    subjects: Sequence[Subject | None],
    directory: Path,
    *,
    counted_rounds: int,
    seed: int,
    report: Report,
) -> list[Turn]:
    """One warm-up round and `counted_rounds` more.

    Args:
        workload: what is saved.
        subjects: the libraries; None stands for the raw limit of the disk.
        directory: an existing directory in which each turn has a new one of its own, deleted after the turn.
        counted_rounds: rounds after the warm-up.
        seed: of the random bytes, which differ in every turn.
        report: called after every turn with the workload's name, the round, the subject's name and the sample.

    Raises:
        ValueError: a load returned something else than what was saved.
    """
    turns = []
    for number in range(counted_rounds + 1):
        for index in _turn_order(len(subjects), number):
            subject = subjects[index]
            name = subject.name if subject else raw_disk.NAME
            tree = workload.make((seed, workload.nbytes, number, index))
            sample = _take_turn(directory / f"{workload.name}-{number}-{name}", subject, tree)
            report(workload.name, number, name, sample)
            turns.append(Turn(number, name, sample))
            del tree
    return turns


def measure_checkpointer(subject: Subject, path: Path, tree: Tree) -> Sample:
    """Save `tree` to `path`, make it durable, drop the caches, load it, compare it."""
    start = Moment.now()
    wait = subject.start_save(path, tree)
    returned = Moment.now()
    wait()
    finished = Moment.now()
    if not subject.durable:
        page_cache.sync_tree(path)
    durable = Moment.now()

    files = page_cache.files_below(path)
    stored_bytes = sum(file.stat().st_size for file in files)
    like = abstract(tree)
    dropped = page_cache.drop(path)
    load_start = Moment.now()
    loaded = jax.block_until_ready(subject.load(path, like))
    loaded_at = Moment.now()
    lazy_s = _touch_s(loaded) - _touch_s(tree)
    check_equal(loaded, tree)
    return Sample(
        blocking_s=returned.wall_s - start.wall_s,
        finished_s=finished.wall_s - start.wall_s,
        durable_s=durable.wall_s - start.wall_s,
        load_s=loaded_at.wall_s - load_start.wall_s,
        lazy_s=max(0.0, lazy_s),
        blocking_cpu_s=returned.cpu_s - start.cpu_s,
        finished_cpu_s=finished.cpu_s - start.cpu_s,
        durable_cpu_s=durable.cpu_s - start.cpu_s,
        load_cpu_s=loaded_at.cpu_s - load_start.cpu_s,
        stored_bytes=stored_bytes,
        stored_files=len(files),
        notes={"caches": dropped},
    )


def _touch_s(tree: Tree) -> float:
    start = Moment.now()
    touch(tree)
    return Moment.now().wall_s - start.wall_s


def _take_turn(path: Path, subject: Subject | None, tree: Tree) -> Sample:
    page_cache.settle()
    try:
        return measure_checkpointer(subject, path, tree) if subject else raw_disk.measure(path, tree)
    finally:
        if path.exists():
            shutil.rmtree(path)
        page_cache.settle()


def _turn_order(count: int, number: int) -> list[int]:
    """Another subject begins in every round, and every other round runs backwards: none has a fixed forerunner."""
    order = [(number + index) % count for index in range(count)]
    return order[::-1] if number % 2 else order
