"""One process of a job of PyTorch that writes a checkpoint: `python -m tests.support.torch_job FOLDER RANK`.

It needs no JAX. The first process writes the whole tensors to `FOLDER/expected`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

PROCESSES = 2


def sharded_tensors(mesh: Any) -> dict[str, Any]:
    """Return tensors in all layouts on two processes."""
    whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),  # 4 and 3 rows
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "copies": distribute_tensor(whole + 1, mesh, [Replicate()]),
        "one_row": distribute_tensor(whole[:1].clone(), mesh, [Shard(0)]),  # the second process has none
        "plain": whole + 2,
    }


def trained_model(mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of a model under FSDP, and of its AdamW."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 9), torch.nn.GELU(), torch.nn.Linear(9, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().sum().backward()
        optimizer.step()
    return get_state_dict(model, optimizer)


def whole(state: Any) -> Any:
    """Return the state with whole tensors."""
    if isinstance(state, dict):
        return {key: whole(child) for key, child in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole(child) for child in state)
    return state.full_tensor() if isinstance(state, DTensor) else state


def main(folder: Path, rank: int) -> None:
    """Write the checkpoint together with the others."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    model, optimizer = trained_model(mesh)
    state = {"sharded": sharded_tensors(mesh), "model": model, "optim": optimizer, "step": 5}
    dcp.save(state, checkpoint_id=folder / "dcp")
    expected = whole(state)
    if rank == 0:
        torch.save(expected, folder / "expected")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
