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
from jaxckpt_train.formats.foreign import begins_as_msgpack_str, first_bytes
from jaxckpt_train.formats.orbax_metadata import OCDBT, TEMPORARY, TREE_METADATA
from jaxckpt_train.store.backends.base import Backend, Entry
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.manifest import NOT_JSON

LEVANTER, TORCHTITAN = "Levanter", "TorchTitan"
TORCH_METADATA, TORCH_SUFFIX = ".metadata", ".distcp"
_STEP = re.compile(r"step-(\d{1,16})")
_LEVANTER_FILE, _MOST_BYTES = "metadata.json", 1 << 20
_MOST_LOOKED_INTO = 4  # an interrupted save may leave a folder without the files that identify the tool
DEFAULT_PREFIX = "checkpoint_"
ARRAYS_OF_A_JOB = "_gda"  # suffix of a directory with the arrays of several processes
_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
_NUMBERED = re.compile(rf"(.*?){_NUMBER.pattern}", re.DOTALL)
_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})  # first bytes of a msgpack map, which is what Flax writes
_MOST_PREFIXES, _MOST_NAMED = 64, 5


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


@dataclasses.dataclass(frozen=True)
class FlaxFile:
    """A file that Flax may have written.

    Attributes:
        path: its path.
        directory: the directory in which it was recognized. None: the user named the file itself.
        is_newest: whether it is the newest checkpoint there.
        before: the path of the checkpoint before it, if there is one.
    """

    path: str
    directory: str | None = None
    is_newest: bool = False
    before: str | None = None


class FlaxNames(NamedTuple):
    """The checkpoints in a directory: their common prefix, and their names, the newest last."""

    prefix: str
    names: list[str]


def sort_like_flax(names: Iterable[str]) -> list[str]:
    """Sort names as Flax does: numbers by value, including signs and exponents, and the text between them as text."""
    return sorted(sorted(names), key=_order_of)


def _order_of(name: str) -> list[str | float]:
    return [float(each) if place % 2 else each for place, each in enumerate(_NUMBER.split(name))]


def flax_names(backend: Backend, directory: str, entries: Sequence[Entry]) -> FlaxNames | None:
    """Return the checkpoints that Flax has left in a directory, or None.

    Like Flax, this takes every entry with the prefix for a checkpoint, except temporary ones and the arrays of
    multi-process jobs.

    Args:
        backend: the storage.
        directory: the directory.
        entries: its entries.

    Raises:
        NotACheckpointError: the directory holds several prefixes, and none of them is Flax's default.
    """
    kinds = {each.name: each.kind for each in entries if _may_be_checkpoint(each.name)}
    files = [name for name, kind in kinds.items() if kind != "directory" and _NUMBERED.fullmatch(name)]
    newest = next(reversed(_of_prefix(kinds, DEFAULT_PREFIX)), None)
    if any(name.startswith(DEFAULT_PREFIX) for name in files) or (
        newest is not None and kinds[newest] == "directory" and _is_orbax_item(backend, f"{directory}/{newest}")
    ):
        return FlaxNames(DEFAULT_PREFIX, _of_prefix(kinds, DEFAULT_PREFIX))
    prefix = _other_prefix(backend, directory, files)
    return None if prefix is None else FlaxNames(prefix, _of_prefix(kinds, prefix))


def certain_checkpoints(backend: Backend, directory: str, entries: Sequence[Entry]) -> list[str]:
    """Return the names of checkpoints that only Flax can have written, the newest last.

    This is `flax_names`, with a look at the first bytes of the last few. Other tools' files may match Flax's names, and
    the caller refuses to save into a directory that holds checkpoints of Flax.
    """
    try:
        found = flax_names(backend, directory, entries)
    except NotACheckpointError:  # several prefixes
        files = (each.name for each in entries if each.kind != "directory" and _may_be_checkpoint(each.name))
        found = FlaxNames("", sort_like_flax(name for name in files if _NUMBERED.fullmatch(name)))
    if found is None:
        return []
    folders, last = {each.name for each in entries if each.kind == "directory"}, found.names[-_MOST_LOOKED_INTO:]
    is_certain = any(each in folders or _begins_as_state(_head(backend, directory, each)) for each in reversed(last))
    return found.names if is_certain else []


def choose_checkpoint(directory: str, found: FlaxNames, step: float | None) -> str:
    """Return the name of the checkpoint of a step, or of the newest one without a step.

    Raises:
        StepNotFoundError: the step does not exist.
    """
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


def _of_prefix(names: Iterable[str], prefix: str) -> list[str]:
    return sort_like_flax(name for name in names if name.startswith(prefix) and name != f"{prefix}tmp")


def _other_prefix(backend: Backend, directory: str, files: Sequence[str]) -> str | None:
    """Return the shortest prefix of the numbered files that start like a msgpack map."""
    by_prefix: dict[str, list[str]] = {}
    for name in sort_like_flax(files):
        match = _NUMBERED.fullmatch(name)
        assert match is not None
        by_prefix.setdefault(match[1], []).append(name)
    newest = {
        prefix: names[-1]
        for prefix, names in itertools.islice(by_prefix.items(), _MOST_PREFIXES)
        if any(_begins_as_map(backend, directory, name) for name in reversed(names[-_MOST_LOOKED_INTO:]))
    }
    shortest = min(newest, key=len, default=None)
    if shortest is not None and not all(prefix.startswith(shortest) for prefix in newest):
        shown = ", ".join(f"{directory}/{name}" for name in list(newest.values())[-_MOST_NAMED:])
        raise NotACheckpointError(
            f"{directory}: holds Flax checkpoints with {len(newest)} prefixes, expected one prefix or the default "
            f"{DEFAULT_PREFIX!r}; pass the path of one checkpoint, the newest of each prefix are {shown}"
        )
    return shortest


def _begins_as_map(backend: Backend, directory: str, name: str) -> bool:
    head = _head(backend, directory, name)
    return bool(head) and head[0] in _MAPS


def _begins_as_state(head: bytes) -> bool:
    """Return whether these are the first bytes of a map whose first key is text, which a pickle never has."""
    key = head[{0xDE: 3, 0xDF: 5}.get(head[0], 1) :] if head and head[0] in _MAPS else b""
    return begins_as_msgpack_str(key)


def _head(backend: Backend, directory: str, name: str) -> bytes:
    """Return the first bytes of a file, or nothing if it cannot be read."""
    try:
        return first_bytes(backend, directory, name)[0]
    except StorageError:
        return b""


def _is_orbax_item(backend: Backend, directory: str) -> bool:
    """Return whether this is the single Orbax item that Flax writes by default, without a step directory around it."""
    try:
        return not {TREE_METADATA, OCDBT}.isdisjoint(entry.name for entry in backend.list(directory))
    except StorageError:
        return False
