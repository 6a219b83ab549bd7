"""Steps that share files, copied by other tools: each one is whole, and its files hold exactly its tensors."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import open_committed
from tests.support.runs import step_path

MIB = 1 << 20
STEPS = range(1, 8)
# From the folder with {name} into the folder {to}.
COPIES = {
    "cp -r": "cp -r {name} {to}",
    "cp -a": "cp -a {name} {to}",
    "tar": "tar -cf {to}/all.tar {name} && tar -xf {to}/all.tar -C {to}",
    "rsync -a": "rsync -a {name} {to}",
    "rsync -aH": "rsync -aH {name} {to}",
}
every_tool = pytest.mark.parametrize("tool", COPIES)


def copied(source: Path, folder: Path, tool: str) -> Path:
    """Copy a directory into a new folder, and return its path there."""
    if shutil.which(tool.split()[0]) is None:
        pytest.skip(f"needs {tool.split()[0]}")
    folder.mkdir()
    subprocess.run(COPIES[tool].format(name=source.name, to=folder), shell=True, cwd=source.parent, check=True)
    return folder / source.name


def state_of(step: int) -> dict[str, Any]:
    """What never changes, what changes once, and what changes in each step."""
    return {
        "base": {"w": jnp.full(MIB // 4, 7, jnp.float32), "b": jnp.arange(MIB // 4, dtype=jnp.int32)},
        "sometimes": jnp.full(MIB // 2, step > 2, jnp.bfloat16),
        "step": jnp.asarray(step),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared") / "run"
    with jct.StepManager(directory, frozen=["base/**"]) as manager:
        for step in STEPS:
            manager.save(step, {"state": state_of(step)})
            manager.wait()
    assert shared_files(directory) >= 2
    return directory


def shared_files(directory: Path) -> int:
    """How many files have several names."""
    counts = Counter(file.stat().st_ino for file in directory.glob("step-*/*/*"))
    return sum(count > 1 for count in counts.values())


def check(step: Path, number: int) -> None:
    """A step has its bytes, also for safetensors, of which each file holds what the manifest says and no more."""
    expected = {
        name: np.asarray(leaf)
        for name, leaf in {**state_of(number)["base"], **state_of(number)}.items()
        if not isinstance(leaf, dict)
    }
    assert jct.verify(step).ok
    found = jct.load(step)
    for name, leaf in {**found["base"], **found}.items():
        if not isinstance(leaf, dict):
            assert np.asarray(leaf).tobytes() == expected[name].tobytes()
    manifest = open_committed(LocalBackend(), str(step)).manifest
    names = dict[str, set[str]]()
    for array in manifest.parts[0].arrays:
        (chunk,) = array.chunks
        names.setdefault(manifest.segments[chunk.segment].file, set()).add(array.name)
    assert {str(file.relative_to(step)) for file in step.glob("*/*")} == names.keys()
    for file, stated in names.items():
        with safe_open(step / file, "flax") as opened:
            assert {*opened.keys()} == stated
            for name in stated:
                tensor = np.asarray(opened.get_tensor(name))
                assert tensor.tobytes() == expected[name.removeprefix("base/")].tobytes()


@every_tool
def test_step_that_is_copied_alone_is_whole(run: Path, tmp_path: Path, tool: str) -> None:
    for number in STEPS:
        check(copied(step_path(run, number), tmp_path / str(number), tool), number)


@every_tool
def test_run_that_is_copied_shares_files_if_the_tool_keeps_links(run: Path, tmp_path: Path, tool: str) -> None:
    copy = copied(run, tmp_path / "copy", tool)
    assert (shared_files(copy) > 0) == (tool in ("cp -a", "tar", "rsync -aH"))
    for number in STEPS:
        check(step_path(copy, number), number)
