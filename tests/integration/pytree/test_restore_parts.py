"""Loading parts of a tree reads few bytes that are not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct

FAST = jct.StoreSettings(durability="none")


READ = """
import sys, jax, jax.numpy as jnp
import jaxckpt_train as jct

def read_bytes():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])

path, only = sys.argv[1:]
jct.load(path, only="step")
before = read_bytes()
found = jct.load(path, only=only)
print(read_bytes() - before, sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(found)))
"""


@pytest.mark.parametrize("only", ["params/**", "opt/1/**", "params/7/w", "**"])
def test_partial_load_reads_few_unneeded_bytes(only: str, tmp_path: Path, run_python: Any) -> None:
    array = np.random.default_rng(0).standard_normal((512, 500), np.float32)
    tree = {
        "params": [{"w": array + n, "b": array[n] + n} for n in range(8)],
        "opt": [[{"w": array - n, "b": array[n] - n} for n in range(8)] for _ in range(2)],
        "step": 3,
    }
    jct.save(tmp_path / "c", tree, settings=FAST)
    read, asked = map(int, run_python(READ, tmp_path / "c", only, check=True).stdout.split())
    assert asked <= read <= 1.05 * asked
