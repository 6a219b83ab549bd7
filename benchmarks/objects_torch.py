"""What a process of the PyTorch environment does in the benchmark of object stores: `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fsspec.config
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.objects_arrays import ARRAYS, MIB, array_bytes, array_name, check, timed

FIRST = "-first"
"""The end of the name of a small checkpoint, saved and loaded before the clock starts."""

Options = Mapping[str, Any]
State = dict[str, torch.Tensor]


def save_by_dcp(bucket: str, mib: int, is_quick: bool, folder: str, options: Options) -> dict[str, float]:
    """A save of one process, through fsspec and s3fs."""
    fsspec.config.conf["s3"] = dict(options.get("s3fs in a save", {}))

    def save(name: str, state: State) -> None:
        dcp.save(state, storage_writer=FsspecWriter(bucket + name, **options["writer"]), no_dist=True)

    save(folder + FIRST, _state(1))
    state = _state(mib)
    return {"seconds": timed(lambda: save(folder, state), mib, is_quick)}


def load_by_dcp(bucket: str, mib: int, is_quick: bool, folder: str, options: Options) -> dict[str, float]:
    """The same, loaded into new tensors."""
    fsspec.config.conf["s3"] = dict(options.get("s3fs in a load", {}))
    found: State = {}

    def load(name: str, mib: int) -> None:
        size = mib * MIB // ARRAYS // 4
        found.update((array_name(number), torch.empty(size, dtype=torch.int32)) for number in range(ARRAYS))
        dcp.load(found, storage_reader=FsspecReader(bucket + name), no_dist=True)

    load(folder + FIRST, 1)
    seconds = timed(lambda: load(folder, mib), mib, is_quick)
    for number in range(ARRAYS):
        check(found[array_name(number)].numpy().tobytes(), array_bytes(number, mib).tobytes())
    return {"seconds": seconds}


def _state(mib: int) -> State:
    # clone: memory of PyTorch's own allocator, as after a training step.
    contents = {array_name(number): array_bytes(number, mib).view(np.int32) for number in range(ARRAYS)}
    return {name: torch.from_numpy(content).clone() for name, content in contents.items()}
