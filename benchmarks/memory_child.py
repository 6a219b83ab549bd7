"""Measures the memory of a new process: of a save, a load, or many saves in turn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import memory_trees, page_cache
from benchmarks.memory_probe import Peak, calm_down, rollup_bytes, usage
from benchmarks.memory_trees import Workload
from benchmarks.step_time_subjects import NOTHING, Nothing, Subject, make_subject

Answer = dict[str, Any]
Step = Callable[[Any], Any]

SERIES_LEAVES = 64


def prepare(subject: str, workload: dict[str, Any], path: str) -> Answer:
    """Save a workload to `path`, to be loaded by another process."""
    tree = memory_trees.make(_workload(workload))
    make_subject(subject).start_save(Path(path), tree)()
    return {"byte_sum": memory_trees.byte_sum(tree)}


def save(subject: str, workload: dict[str, Any], path: str, train: bool) -> Answer:
    """The memory of one save with default settings, once the library is warm from a save of a few bytes.

    With `train` a jitted step that donates the state runs while the save is under way.
    """
    chosen = make_subject(subject)
    _warm_up(chosen, Path(path + "-warm"))
    tree = memory_trees.make(_workload(workload))
    step = _compiled_step(tree) if train else None
    answer = measure_save(chosen, tree, Path(path), step)
    shutil.rmtree(path)
    return answer


def measure_save(subject: Subject, tree: Any, path: Path, step: Step | None = None) -> Answer:
    """The memory of one save; `step` is called once while it is under way, and may take the memory of the tree."""
    page_cache.settle()
    with Peak() as peak:
        wait = subject.start_save(path, tree)
        if step is not None:
            tree = jax.block_until_ready(step(tree))
        wait()
    return {**_answer(peak), "extra_bytes": peak.extra, "extra_private_bytes": peak.extra_private}


def load(subject: str, workload: dict[str, Any], path: str, budget: int | None, byte_sum: int) -> Answer:
    """The memory of one load of what `prepare` saved, beyond what the loaded arrays take.

    Raises:
        ValueError: not what was saved.
    """
    chosen, like = make_subject(subject, budget), memory_trees.target(_workload(workload))
    _warm_up(chosen, Path(path + "-warm"))
    with Peak() as peak:
        tree = jax.block_until_ready(chosen.load(Path(path), like))
    found = memory_trees.byte_sum(tree)
    if found != byte_sum:
        raise ValueError(f"{path}: loaded bytes sum up to {found}, saved ones to {byte_sum}")
    held = memory_trees.device_bytes(tree)
    calm_down()
    return {
        **_answer(peak),
        "result_bytes": held,
        "extra_bytes": peak.extra - held,
        "extra_private_bytes": peak.extra_private - held,
        "left_bytes": usage().private - peak.before.private - held,
    }


def series(subject: str, saves: int, size_bytes: int, path: str) -> Answer:
    """The memory after each of many saves of a state that a jitted, donating step changes between them."""
    chosen = Nothing(0.0) if subject == NOTHING else make_subject(subject)
    return run_series(chosen, saves, size_bytes, Path(path))


def run_series(subject: Subject, saves: int, size_bytes: int, path: Path) -> Answer:
    """As `series`, of any subject."""
    shape = (size_bytes // (4 * SERIES_LEAVES),)
    tree = {f"leaf_{number:04d}": jnp.full(shape, number, jnp.float32) for number in range(SERIES_LEAVES)}
    step = _compiled_step(tree)
    private, rss = [], []
    for number in range(saves):
        tree = jax.block_until_ready(step(tree))
        subject.start_save(path / f"{number:03d}", tree)()
        shutil.rmtree(path / f"{number:03d}", ignore_errors=True)
        now = usage()
        private.append(now.private)
        rss.append(now.total)
    return {"private_bytes": private, "rss_bytes": rss}


def _compiled_step(tree: Any) -> Step:
    """A step that puts its result where the tree lies."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    return step.lower(tree).compile()


def _warm_up(subject: Subject, path: Path) -> None:
    """A save and a load of a few bytes: imports, threads, and what is allocated once."""
    tree = {"leaf": jax.device_put(np.arange(8, dtype=np.float32))}
    subject.start_save(path, tree)()
    subject.load(path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree))
    shutil.rmtree(path)


def _workload(fields: dict[str, Any]) -> Workload:
    return Workload(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})


def _answer(peak: Peak) -> Answer:
    return {
        "before_bytes": peak.before.total,
        "peak_bytes": peak.after.peak,
        "file_growth_bytes": peak.after.file - peak.before.file,
        "rollup_error_bytes": usage().total - rollup_bytes(),
        "samples": peak.samples,
    }
