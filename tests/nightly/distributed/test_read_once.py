"""Loads that read once per job with small budgets, and between any shardings: the bytes, and how many are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.jobs.arrays import global_array
from tests.support.jobs.counted_loads import (
    ARRAYS,
    MIB,
    SPECS,
    WAYS,
    Arrays,
    Count,
    apart,
    holds,
    save_alone,
    size_of,
    target_of,
)
from tests.support.jobs.fixtures import JobOf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "c"
    save_alone(str(path), ARRAYS)
    return path


def check(answers: list[dict[str, Any]], size: int) -> None:
    assert [answer["wrong"] for answer in answers] == [[]] * len(answers)
    assert sum(answer["bytes"] for answer in answers) <= 1.02 * size


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("budget", [1, 6])
def test_loads_work_with_small_budgets(whole: Path, job_of: JobOf, budget: int, load: Any) -> None:
    answers = job_of(4, 1).call(load, str(whole), [2, 2], SPECS, ARRAYS, True, budget * MIB)
    check(answers, size_of(ARRAYS))


def save_cut(path: str, specs: dict[str, list[Any]]) -> None:
    jct.save(path, {name: global_array(shape, [2, 2], specs[name], "int32") for name, (shape, _) in CUT.items()})


CUT: Arrays = {"a": ([2048, 1024], "int32"), "b": ([64, 96, 128], "int32"), "c": ([640, 8], "int32")}
CUTS: list[dict[str, list[Any]]] = [
    {"a": [None, "x"], "b": ["y", None, "x"], "c": []},
    {"a": ["x", "y"], "b": [None, ["x", "y"]], "c": ["y"]},
    {"a": [], "b": [], "c": [["y", "x"]]},
]


def load_cut(path: str, mesh: list[int], specs: dict[str, list[Any]], is_apart: bool) -> dict[str, Any]:
    count = Count()
    settings = jct.StoreSettings(read_once=True, read_budget_bytes=8 * MIB)
    with apart(is_apart=is_apart):
        loaded = jct.load(path, target_of(CUT, specs, mesh), settings=settings, progress=count)
    right = {name: np.arange(math.prod(shape), dtype=np.int32).reshape(shape) for name, (shape, _) in CUT.items()}
    return {"wrong": [name for name in CUT if not holds(loaded[name], right[name])], "bytes": count.bytes}


@pytest.mark.parametrize("saved", [0, 1, 2])
@pytest.mark.parametrize("loaded", [0, 1, 2])
def test_any_cut_to_any_other(tmp_path: Path, job_of: JobOf, saved: int, loaded: int) -> None:
    job_of(4, 1).call(save_cut, str(tmp_path / "c"), CUTS[saved])
    for processes, devices, is_apart in ((4, 1, False), (4, 1, True), (2, 4, True)):
        mesh = [2, processes * devices // 2]
        answers = job_of(processes, devices).call(load_cut, str(tmp_path / "c"), mesh, CUTS[loaded], is_apart)
        check(answers, size_of(CUT))
