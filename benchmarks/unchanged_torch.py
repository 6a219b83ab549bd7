"""What a process of the PyTorch environment does in the benchmark of unchanged leaves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks import host_memory, page_cache
from benchmarks.unchanged_sizes import BLOCKS, RANK, WIDTH, base_rows, written_below

MIB = 1 << 20


def save_by_dcp(directory: str, mib: int, saves: int) -> list[dict[str, float]]:
    """Saves by `torch.distributed.checkpoint`, whose writer syncs its files."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"{number}/base": torch.randn(base_rows(mib), WIDTH) for number in range(BLOCKS)}
    moving = {}
    for number in range(BLOCKS):
        for part in ("", "mu/", "nu/"):
            moving[f"{part}{number}/down"] = torch.randn(WIDTH, RANK)
            moving[f"{part}{number}/up"] = torch.randn(RANK, WIDTH)
    found = []
    before = written_below(folder)
    for step in range(1, saves + 1):
        for tensor in moving.values():
            tensor.add_(1)
        host_memory.make_present(mib * MIB, is_quick=False)
        page_cache.settle()
        path = os.path.join(directory, str(step))
        started = time.perf_counter()
        dcp.save({**state, **moving}, checkpoint_id=path, no_dist=True)
        seconds = time.perf_counter() - started
        now = written_below(folder)
        found.append(
            {"seconds": seconds, "written": float(sum(size for each, size in now.items() if each not in before))}
        )
        before = now
    return found
