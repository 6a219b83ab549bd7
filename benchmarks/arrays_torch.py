"""PyTorch tensors on the CPU, in a flat dict as `Module.state_dict` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.arrays import State
from benchmarks.leaf import ITEM_BYTES, Leaf
from benchmarks.random_bytes import each_leaf
from benchmarks.workloads import Workload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32}


class TorchArrays:
    """See `Arrays`."""

    def make(self, workload: Workload, seed: Sequence[int]) -> State:
        return {leaf.name: _tensor(content, leaf) for leaf, content in each_leaf(workload, seed)}

    def like(self, workload: Workload, target: str) -> State:
        return {
            leaf.name: torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype], device="meta")
            for leaf in workload.wanted(target)
        }

    def wait(self, loaded: State) -> None:
        """Tensors on the CPU are always ready."""

    def found(self, loaded: State) -> dict[str, Any]:
        return dict(loaded)

    def difference(self, array: Any, leaf: Leaf, workload: Workload, target: str) -> str | None:
        if not isinstance(array, torch.Tensor) or array.device.type != "cpu":
            return f"loaded a {type(array).__name__}, wanted a tensor on the CPU"
        if (tuple(array.shape), array.dtype) != (leaf.shape, DTYPES[leaf.dtype]):
            return f"loaded {array.dtype}{list(array.shape)}, saved was {leaf.dtype}{list(leaf.shape)}"
        return None

    def pieces(self, array: Any, leaf: Leaf) -> Iterator[tuple[np.ndarray, tuple[slice, ...]]]:
        memory = array.reshape(-1).view(torch.uint8).numpy()
        yield memory.reshape(*leaf.shape, ITEM_BYTES[leaf.dtype]), ()


def _tensor(content: np.ndarray, leaf: Leaf) -> torch.Tensor:
    # clone: memory of PyTorch's own allocator, as after a training step.
    return torch.from_numpy(content).view(DTYPES[leaf.dtype]).reshape(leaf.shape).clone()


IMPLEMENTATION = TorchArrays()
