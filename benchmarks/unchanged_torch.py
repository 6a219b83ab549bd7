"""What a process of the PyTorch environment does in the benchmark of unchanged leaves."""

from __future__ import annotations

import os

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.unchanged_sizes import BLOCKS, RANK, WIDTH, base_rows, measured_saves


def save_by_dcp(directory: str, mib: int, saves: int) -> list[dict[str, float]]:
    """Saves by `torch.distributed.checkpoint`, whose writer syncs its files."""
    state = {f"{number}/base": torch.randn(base_rows(mib), WIDTH) for number in range(BLOCKS)}
    moving = {}
    for number in range(BLOCKS):
        for part in ("", "mu/", "nu/"):
            moving[f"{part}{number}/down"] = torch.randn(WIDTH, RANK)
            moving[f"{part}{number}/up"] = torch.randn(RANK, WIDTH)

    def update() -> dict[str, torch.Tensor]:
        for tensor in moving.values():
            tensor.add_(1)
        return {**state, **moving}

    def save(step: int, state: dict[str, torch.Tensor]) -> None:
        dcp.save(state, checkpoint_id=os.path.join(directory, str(step)), no_dist=True)

    return measured_saves(directory, mib, saves, update, save)
