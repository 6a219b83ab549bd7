"""The leaves of the newest step with their sizes."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

import jaxckpt_train as jct
from tests.support.report_runs import gathered_of
from tests.support.runs import made_run, step_path, truncate_the_manifest


def test_leaves_and_files_have_shape_and_size(tmp_path: Path) -> None:
    state = {"w": np.ones((3, 5), np.float16), "k": jax.random.key(0), "n": 4, "none": None}
    with jct.StepManager(tmp_path) as manager:
        manager.save(7, {"state": state, "data": jct.JsonValue({"next": 3})})
        manager.wait()
    tree = gathered_of(tmp_path).tree
    assert tree is not None
    assert (tree.step, tree.name) == (7, "step-0000000007")
    found = {leaf.name: (leaf.form, leaf.bytes) for leaf in tree.leaves}
    (file,) = set(found) - {"state/w", "state/k", "state/n", "state/none"}
    size = (step_path(tmp_path, 7) / file).stat().st_size
    assert found == {
        "state/w": ("float16[3,5]", 30),
        "state/k": ("key<threefry2x32>[]", 8),
        "state/n": ("Python int", 0),
        "state/none": ("None", 0),
        file: ("file", size),
    }


def test_leaves_are_those_of_newest_valid_step(tmp_path: Path) -> None:
    made_run(tmp_path, 1, 2)
    truncate_the_manifest(step_path(tmp_path, 2))
    tree = gathered_of(tmp_path).tree
    assert tree is not None
    assert tree.step == 1
    truncate_the_manifest(step_path(tmp_path, 1))
    assert gathered_of(tmp_path).tree is None
