"""Reads what lies in the files of a checkpoint of PyTorch through PyTorch, which is imported here alone."""

from __future__ import annotations

import errno
import importlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.formats.foreign_calls import foreign_call
from jaxckpt_train.formats.torch_metadata import KNOWN_DTYPES, Item
from jaxckpt_train.store.boxes import Box, box_elements, box_shape
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.machine import memory_bytes
from jaxckpt_train.store.manifest import shown

OLDEST = (2, 8)  # below 2.6 `weights_only=True` could be made to run code


class Refused:
    """In place of an object that is more than plain data.

    Attributes:
        why: what it would take to make it.
    """

    def __init__(self, why: str) -> None:
        self.why = why


class TorchItems:
    """Reads single tensors and objects.

    Args:
        directory: of the checkpoint.

    Raises:
        SettingsError: PyTorch is not installed, or too old.
    """

    def __init__(self, directory: str) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
            self._planner: Any = importlib.import_module("torch.distributed.checkpoint.planner")
        except ImportError as error:
            raise SettingsError(
                f"{directory}: a distributed checkpoint of PyTorch is read through PyTorch, which cannot be imported "
                f"({shown(error)}): pip install 'jaxckpt-train[torch]', or pip install torch"
            ) from error
        version = str(self._torch.__version__)
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
            raise SettingsError(f"{directory}: expected PyTorch {OLDEST[0]}.{OLDEST[1]} or newer, found {version}")
        self._directory = directory

    def tensor(self, item: Item, box: Box, dtype: str) -> np.ndarray:
        """The bytes of a piece of a tensor, flat.

        Raises:
            CorruptCheckpointError: it is damaged.
            StorageError: it cannot be read, or does not fit into memory.
        """
        size = box_elements(box) * DTYPES[dtype].itemsize
        try:
            data = np.empty(size, np.uint8)
        except (MemoryError, ValueError) as error:
            what = f"{size} bytes of {item.name!r} do not fit into memory: this machine has {memory_bytes()}"
            raise StorageError(errno.ENOMEM, what, self._directory) from error
        target = self._torch.from_numpy(data).view(getattr(self._torch, dtype)).reshape(box_shape(box))
        self._read([item], self._planner.LoadItemType.TENSOR, box_shape(box), _IntoTensor(target))
        return data

    def values(self, items: Sequence[Item]) -> Mapping[str, Any]:
        """What is no tensor of its own, by its name: plain data, which may have tensors within, or why it is none.

        Raises:
            CorruptCheckpointError: one is damaged.
            StorageError: one cannot be read.
        """
        found: dict[str, Any] = {}
        self._read(items, self._planner.LoadItemType.BYTE_IO, (), _Values(self._torch, self._directory, found))
        return found

    def array(self, value: Any) -> np.ndarray | None:
        """A tensor that lies within an object, as an array; None: it is none, or of another dtype."""
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        if (
            not isinstance(value, self._torch.Tensor)
            or dtype not in KNOWN_DTYPES
            or value.layout != self._torch.strided
        ):
            return None
        data = np.empty(value.numel() * DTYPES[dtype].itemsize, np.uint8)
        self._torch.from_numpy(data).view(value.dtype).reshape(value.shape).copy_(value.detach())
        return data.view(DTYPES[dtype]).reshape(tuple(value.shape))

    def _read(self, items: Sequence[Item], kind: Any, shape: tuple[int, ...], planner: Any) -> None:
        """Have PyTorch's reader read whole items; it is never told to read the metadata, which it would run."""
        size, index = self._torch.Size, self._checkpoint.metadata.MetadataIndex
        zeros = size([0] * len(shape))
        named = {index(item.name): item for item in items}
        reads = [self._planner.ReadItem(kind, key, zeros, key, zeros, size(shape)) for key in named]
        try:
            reader = self._checkpoint.FileSystemReader(self._directory)
            reader.set_up_storage_reader(self._checkpoint.metadata.Metadata({}, storage_data=named), True)
            with foreign_call():
                reader.read_data(self._planner.LoadPlan(reads), planner).wait()
        except (CorruptCheckpointError, StorageError, MemoryError):
            raise
        except OSError as error:
            raise StorageError(error.errno or 0, error.strerror or shown(error), self._directory) from error
        except Exception as error:  # a foreign parser
            names = ", ".join(repr(item.name) for item in items[:3])
            raise CorruptCheckpointError(f"{self._directory}: {names} cannot be read: {shown(error)}") from error


class _IntoTensor:
    """Has the reader copy what it read into a tensor; what of PyTorch's `LoadPlanner` is asked for then."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def resolve_tensor(self, read_item: Any) -> Any:
        """Where it goes."""
        return self._target

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        """It is there."""


class _Values:
    """Takes objects as plain data; what of PyTorch's `LoadPlanner` is asked for then.

    PyTorch's own planner would make whatever an object says it is, and run code for that.
    """

    def __init__(self, torch: Any, directory: str, found: dict[str, Any]) -> None:
        self._torch, self._directory, self._found = torch, directory, found

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """One of them."""
        name = read_item.dest_index.fqn
        try:
            self._found[name] = self._torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # a foreign parser
            unknown = self._unknown(value)
            if not unknown:
                raise CorruptCheckpointError(f"{self._directory}: {name!r} cannot be read: {shown(error)}") from error
            self._found[name] = Refused(f"to make it would call {shown(', '.join(unknown))}")

    def _unknown(self, value: io.BytesIO) -> list[str]:
        """The names in an object that PyTorch does not take for plain data."""
        value.seek(0)
        try:
            return sorted(self._torch.serialization.get_unsafe_globals_in_checkpoint(value))
        except Exception:  # noqa: BLE001  # a foreign parser: what is damaged has none
            return []
