"""Recognizes step folders of Levanter and TorchTitan, which use the same names as this library: `step-100`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.manifest import NOT_JSON

LEVANTER, TORCHTITAN = "Levanter", "TorchTitan"
TORCH_METADATA, TORCH_SUFFIX = ".metadata", ".distcp"
_STEP = re.compile(r"step-(\d{1,16})")
_LEVANTER_FILE, _MOST_BYTES = "metadata.json", 1 << 20
_MOST_LOOKED_INTO = 4  # an interrupted save may leave a folder without the files that identify the tool


class StepFolders(NamedTuple):
    """The step folders of one tool in a directory: the tool, and the names, the highest step last."""

    tool: str
    names: list[str]


def step_folders(backend: Backend, directory: str, entries: Sequence[Entry]) -> StepFolders | None:
    """Return the step folders that Levanter or TorchTitan has left in a directory, or None.

    Args:
        backend: the storage.
        directory: the directory of the run.
        entries: its entries.
    """
    found = {int(match[1]): each.name for each in entries if (match := _STEP.fullmatch(each.name)) and _is_folder(each)}
    names = [found[step] for step in sorted(found)]
    for name in reversed(names[-_MOST_LOOKED_INTO:]):
        with contextlib.suppress(StorageError):
            tool = _tool_of(backend, f"{directory}/{name}")
            if tool is not None:
                return StepFolders(tool, names)
    return None


def _is_folder(entry: Entry) -> bool:
    return entry.kind == "directory"


def _tool_of(backend: Backend, folder: str) -> str | None:
    names = {each.name for each in backend.list(folder)}
    if TORCH_METADATA in names or any(name.endswith(TORCH_SUFFIX) for name in names):
        return TORCHTITAN
    return LEVANTER if _LEVANTER_FILE in names and _is_levanter(backend, folder) else None


def _is_levanter(backend: Backend, folder: str) -> bool:
    """Return whether `metadata.json` has the keys that Levanter writes: the step and the time of the save."""
    try:
        data = read_or_none(backend, folder, _LEVANTER_FILE, _MOST_BYTES)
        found: Any = None if data is None else msgspec.json.decode(data)
    except (CorruptCheckpointError, *NOT_JSON):
        return False
    return isinstance(found, dict) and {"step", "timestamp"} <= found.keys()
