"""Make the distributed checkpoint of PyTorch in `torch/`: `python -m tests.golden.make_torch`. It needs PyTorch.

The checkpoint is committed, so that code that needs no PyTorch is tested on a real checkpoint without PyTorch.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

FOLDER = Path(__file__).parent / "torch"


def make() -> None:
    """Write the checkpoint, and replace the old one."""
    import torch
    import torch.distributed.checkpoint as dcp

    shutil.rmtree(FOLDER, ignore_errors=True)
    state = {
        "model": {
            "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).bfloat16(),
            "layer.bias": torch.ones(4),
        },
        "list": [{"lr": 0.5}, torch.tensor(3)],
        "name": "golden",
    }
    os.chdir(FOLDER.parent)  # the path is in the file
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=FOLDER.name, no_dist=True)


if __name__ == "__main__":
    make()
