"""Checkpoints that two processes of PyTorch wrote: tensors are assembled from their pieces, or read in part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.formats.torch import TorchItems
from jaxckpt_train.inspection.runs import open_at
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.reader import read_box
from tests.integration.formats.test_torch_loads import assert_equal, torch_bytes
from tests.support.model_states import mesh
from tests.support.paths import REPO_ROOT
from tests.support.same_trees import raw

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: `make torch-imports` tries this", exc_type=ImportError
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished job, with the checkpoint `dcp` and the file `expected`."""
    folder = tmp_path_factory.mktemp("job")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.support.torch_job", str(folder)]
    root = REPO_ROOT
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=root, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            errors = process.communicate(timeout=200)[1]
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    assert len(list((folder / "dcp").glob("*.distcp"))) == 2
    return folder


def test_tensors_of_all_processes_are_put_together(job: Path) -> None:
    assert_equal(jct.load(job / "dcp"), torch.load(job / "expected"))


def test_tensors_load_into_other_shardings(job: Path) -> None:
    expected = torch.load(job / "expected")["sharded"]
    like = {
        "rows": jax.ShapeDtypeStruct(
            (7, 6), jnp.float32, sharding=NamedSharding(mesh(), PartitionSpec(None, "tensor"))
        ),
        "columns": jax.ShapeDtypeStruct((7, 6), jnp.float32, sharding=NamedSharding(mesh(), PartitionSpec())),
    }
    found = jct.load(job / "dcp", {"sharded": like}, only=["sharded/rows", "sharded/columns"], cast=True)["sharded"]
    for name, target in like.items():
        assert found[name].sharding == target.sharding
        assert raw(found[name]) == torch_bytes(expected[name].float())


@pytest.mark.parametrize(
    ("name", "box", "pieces"),
    [
        ("rows", ((1, 3), (0, 6)), 1),
        ("rows", ((3, 5), (2, 3)), 2),
        ("columns", ((0, 7), (3, 5)), 1),
        ("columns", ((2, 3), (2, 4)), 2),
        ("one_row", ((0, 1), (0, 6)), 1),
    ],
)
def test_only_the_pieces_of_a_box_are_read(
    job: Path, name: str, box: tuple[tuple[int, int], ...], pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = list[object](), TorchItems.read_tensor

    def counted(self: TorchItems, item: Any, dtype: str, target: np.ndarray) -> None:
        reads.append(item)
        read(self, item, dtype, target)

    monkeypatch.setattr(TorchItems, "read_tensor", counted)
    opened = open_at(LocalBackend(), str(job / "dcp"))
    array = opened.arrays()[f"state/sharded/{name}"]
    whole = torch.load(job / "expected")["sharded"][name][tuple(slice(*each) for each in box)]
    target = np.zeros(whole.numel() * whole.element_size(), np.uint8)
    read_box(opened.files, opened.committed, array, box, target, opened.settings)
    assert bytes(target) == torch_bytes(whole)
    assert len(reads) == len(set(reads)) == pieces
