"""Recognizes the checkpoints of Flax, Levanter and TorchTitan in a directory by names and a few bytes. Needs no JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxckpt_train.errors import CorruptCheckpointError, NotACheckpointError, StepNotFoundError, StorageError
from jaxckpt_train.formats.flax import ARRAYS_OF_A_JOB
from jaxckpt_train.formats.orbax_names import OCDBT, TEMPORARY, TREE_METADATA, begins_as
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.manifest import NOT_JSON

LEVANTER, TORCHTITAN = "Levanter", "TorchTitan"
TORCH_METADATA, TORCH_SUFFIX = ".metadata", ".distcp"
_STEP = re.compile(r"step-(\d{1,16})")
_LEVANTER_FILE, _MOST_BYTES = "metadata.json", 1 << 20
_MOST_LOOKED_INTO = 4  # an interrupted save may leave a folder without the files that identify the tool
DEFAULT_PREFIX = "checkpoint_"
_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
_NUMBERED = re.compile(rf"(.*?){_NUMBER.pattern}", re.DOTALL)
_MOST_PREFIXES, _MOST_NAMED = 64, 5


class StepFolders(NamedTuple):
    """The step folders of one tool in a directory: the tool, and the names, the highest step last."""

    tool: str
    names: list[str]


def step_folders(backend: Backend, directory: str, entries: Sequence[Entry]) -> StepFolders | None:
    """Return the step folders that Levanter or TorchTitan has left in a directory, or None."""
    folders = (each.name for each in entries if each.kind == "directory")
    found = {int(match[1]): name for name in folders if (match := _STEP.fullmatch(name))}
    names = [found[step] for step in sorted(found)]
    for name in reversed(names[-_MOST_LOOKED_INTO:]):
        with contextlib.suppress(StorageError):
            inner = [each.name for each in backend.list(f"{directory}/{name}")]
            if TORCH_METADATA in inner or any(each.endswith(TORCH_SUFFIX) for each in inner):
                return StepFolders(TORCHTITAN, names)
            if _LEVANTER_FILE in inner and _is_levanter(backend, f"{directory}/{name}"):
                return StepFolders(LEVANTER, names)
    return None


def _is_levanter(backend: Backend, folder: str) -> bool:
    """Return whether `metadata.json` has the keys that Levanter writes: the step and the time of the save."""
    try:
        data = read_or_none(backend, folder, _LEVANTER_FILE, _MOST_BYTES)
        found: Any = None if data is None else msgspec.json.decode(data)
    except (CorruptCheckpointError, *NOT_JSON):
        return False
    return isinstance(found, dict) and {"step", "timestamp"} <= found.keys()


@dataclasses.dataclass(frozen=True)
class FlaxFile:
    """A file that Flax may have written."""

    path: str
    directory: str | None = None  # in which it was recognized; None: the user named the file itself
    is_newest: bool = False  # of the checkpoints there
    before: str | None = None  # the path of the checkpoint before it, if it is the newest


class FlaxNames(NamedTuple):
    """The checkpoints in a directory: their common prefix, and their names, the newest last."""

    prefix: str
    names: list[str]


def sort_like_flax(names: Iterable[str]) -> list[str]:
    """Sort names as Flax does: numbers by value, including signs and exponents, and the text between them as text."""

    def order(name: str) -> list[str | float]:
        return [float(each) if place % 2 else each for place, each in enumerate(_NUMBER.split(name))]

    return sorted(sorted(names), key=order)


def flax_names(backend: Backend, directory: str, entries: Sequence[Entry]) -> FlaxNames | None:
    """Return the checkpoints that Flax has left in a directory, or None.

    Like Flax, this takes every entry with the prefix for a checkpoint, except temporary ones and the arrays of
    multi-process jobs. Raises NotACheckpointError: there are several prefixes, and none of them is Flax's default.
    """
    kinds = {each.name: each.kind for each in entries if _may_be_checkpoint(each.name)}
    files = _numbered_files(entries)
    named = _of_prefix(kinds, DEFAULT_PREFIX)
    is_folder = bool(named) and kinds[named[-1]] == "directory"
    if any(name.startswith(DEFAULT_PREFIX) for name in files) or (
        is_folder and _is_orbax_item(backend, f"{directory}/{named[-1]}")
    ):
        return FlaxNames(DEFAULT_PREFIX, named)
    by_prefix: dict[str, list[str]] = {}
    for name in files:
        if match := _NUMBERED.fullmatch(name):
            by_prefix.setdefault(match[1], []).append(name)
    newest = {
        prefix: names[-1]
        for prefix, names in itertools.islice(by_prefix.items(), _MOST_PREFIXES)
        if any(begins_as(backend, directory, name) == "map" for name in reversed(names[-_MOST_LOOKED_INTO:]))
    }
    if len(newest) > 1:
        shown = ", ".join(f"{directory}/{name}" for name in list(newest.values())[-_MOST_NAMED:])
        raise NotACheckpointError(
            f"{directory}: holds Flax checkpoints with {len(newest)} prefixes, expected one prefix or the default "
            f"{DEFAULT_PREFIX!r}; pass the path of one checkpoint, the newest of each prefix are {shown}"
        )
    return next((FlaxNames(prefix, _of_prefix(kinds, prefix)) for prefix in newest), None)


def certain_checkpoints(backend: Backend, directory: str, entries: Sequence[Entry]) -> list[str]:
    """Return the names of checkpoints that only Flax can have written, the newest last.

    Other tools' files may match Flax's names, so this looks at the first bytes of the last few.
    """
    try:
        found = flax_names(backend, directory, entries)
        names = [] if found is None else found.names
    except NotACheckpointError:  # several prefixes
        names = _numbered_files(entries)
    folders = {each.name for each in entries if each.kind == "directory"}
    last = reversed(names[-_MOST_LOOKED_INTO:])
    return names if any(each in folders or begins_as(backend, directory, each) == "map" for each in last) else []


def choose_checkpoint(directory: str, found: FlaxNames, step: float | None) -> str:
    """Return the name of the checkpoint of a step, or of the newest one without a step."""
    if step is None:
        return found.names[-1]
    numbers = {name: name.removeprefix(found.prefix) for name in found.names}
    same = [name for name, number in numbers.items() if _NUMBER.fullmatch(number) and float(number) == step]
    if not same:
        there = ", ".join(list(numbers.values())[-_MOST_NAMED:])
        raise StepNotFoundError(f"{directory}: has no step {step}; the last steps are {there}")
    exact = f"{found.prefix}{step}"
    return exact if exact in same else same[-1]


def _may_be_checkpoint(name: str) -> bool:
    return not name.endswith(ARRAYS_OF_A_JOB) and TEMPORARY not in name


def _numbered_files(entries: Sequence[Entry]) -> list[str]:
    files = (each.name for each in entries if each.kind != "directory" and _may_be_checkpoint(each.name))
    return sort_like_flax(name for name in files if _NUMBERED.fullmatch(name))


def _of_prefix(names: Iterable[str], prefix: str) -> list[str]:
    return sort_like_flax(name for name in names if name.startswith(prefix) and name != f"{prefix}tmp")


def _is_orbax_item(backend: Backend, directory: str) -> bool:
    """Return whether this is the single Orbax item that Flax writes by default, without a step directory around it."""
    with contextlib.suppress(StorageError):
        return not {TREE_METADATA, OCDBT}.isdisjoint(entry.name for entry in backend.list(directory))
    return False
