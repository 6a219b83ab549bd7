"""The subjects of the PyTorch environment: `torch_dcp`, `torchsnapshot`, `torch_save` and `safetensors_mapped`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from benchmarks.arrays import State
from benchmarks.subject import Wait


class TorchDcp:
    """`torch.distributed.checkpoint`: `async_save` and `load`, one process, no process group.

    It syncs its files (`FileSystemWriter(sync_files=True)` is the default), but no directory.
    """

    arrays = "torch"
    durable = False
    packages = ("torch", "numpy")

    def __init__(self) -> None:
        import torch.distributed.checkpoint

        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self._dcp = torch.distributed.checkpoint

    def start_save(self, path: Path, state: State) -> Wait:
        response = self._dcp.async_save(state, checkpoint_id=path, no_dist=True)

        def wait() -> None:
            response.result()

        return wait

    def load(self, path: Path, like: State) -> State:
        state = _empty(like)
        self._dcp.load(state, checkpoint_id=path, no_dist=True)
        return state

    def close(self) -> None:
        """Nothing is kept that needs closing."""


class Torchsnapshot:
    """`Snapshot.async_take` and `restore`. It syncs nothing."""

    arrays = "torch"
    durable = False
    packages = ("torchsnapshot", "torch", "numpy")

    def __init__(self) -> None:
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        import torchsnapshot

        self._torchsnapshot = torchsnapshot

    def start_save(self, path: Path, state: State) -> Wait:
        pending = self._torchsnapshot.Snapshot.async_take(str(path), self._stateful(state))

        def wait() -> None:
            pending.wait()

        return wait

    def load(self, path: Path, like: State) -> State:
        stateful = self._stateful(_empty(like))
        self._torchsnapshot.Snapshot(str(path)).restore(stateful)
        return dict(stateful["state"])

    def close(self) -> None:
        """Nothing is kept that needs closing."""

    def _stateful(self, state: State) -> dict[str, Any]:
        return {"state": self._torchsnapshot.StateDict(**state)}


class TorchSave:
    """`torch.save` and `torch.load` of one file. It syncs nothing."""

    arrays = "torch"
    durable = False
    packages = ("torch", "numpy")

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def start_save(self, path: Path, state: State) -> None:
        path.mkdir()
        self._torch.save(state, path / "state.pt")

    def load(self, path: Path, like: State) -> State:
        return self._torch.load(path / "state.pt", weights_only=True)

    def close(self) -> None:
        """Nothing is kept."""


class SafetensorsMapped:
    """`safetensors.torch`: of its interfaces the one that maps the file instead of copying out of it.

    The load is `load_file`'s own loop, over the names that are wanted. Nothing is verified. Whatever the load leaves on
    the disk is read when the tensors are touched, which is in its time. A save syncs nothing.
    """

    arrays = "torch"
    durable = False
    packages = ("safetensors", "torch", "numpy")

    def __init__(self) -> None:
        import safetensors.torch

        self._save_file, self._open = safetensors.torch.save_file, safetensors.safe_open

    def start_save(self, path: Path, state: State) -> None:
        path.mkdir()
        self._save_file(state, path / "model.safetensors")

    def load(self, path: Path, like: State) -> State:
        with self._open(path / "model.safetensors", framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in like}

    def close(self) -> None:
        """Nothing is kept but what the tensors map."""


def _empty(like: State) -> State:
    """Tensors to load into: both libraries load in place."""
    import torch

    return {name: torch.empty_like(leaf, device="cpu") for name, leaf in like.items()}
