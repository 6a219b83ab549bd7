"""The directories of `flax.training.checkpoints`: which names are checkpoints, their order, and which one is meant."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxckpt_train.errors import NotACheckpointError, StepNotFoundError, StorageError
from jaxckpt_train.formats.foreign import begins_as_text, first_bytes
from jaxckpt_train.formats.orbax_metadata import OCDBT, TEMPORARY, TREE_METADATA
from jaxckpt_train.store.backends.base import Backend, Entry

DEFAULT_PREFIX = "checkpoint_"
ARRAYS_OF_A_JOB = "_gda"  # the end of the name of a directory with arrays of several processes
_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)")
_NUMBERED = re.compile(rf"(.*?){_NUMBER.pattern}", re.DOTALL)
_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})  # how a map of msgpack begins, which is what Flax writes
_MOST_PREFIXES, _MOST_LOOKED_INTO, _MOST_NAMED = 64, 4, 5


@dataclasses.dataclass(frozen=True)
class FlaxFile:
    """A file that Flax may have written.

    Attributes:
        path: of it.
        directory: in which it was found as a checkpoint of Flax; None: it was named by itself.
        is_newest: whether it is the newest one there.
        before: the path of the one before that, if there is one.
    """

    path: str
    directory: str | None = None
    is_newest: bool = False
    before: str | None = None


class FlaxNames(NamedTuple):
    """The checkpoints in a directory: what their names begin with, and all names, the newest last."""

    prefix: str
    names: list[str]


def in_flax_order(names: Iterable[str]) -> list[str]:
    """Names as Flax sorts them: numbers by their values, signs and all, and what is between them as text."""
    return sorted(sorted(names), key=_order_of)


def _order_of(name: str) -> list[str | float]:
    return [float(each) if place % 2 else each for place, each in enumerate(_NUMBER.split(name))]


def flax_names(backend: Backend, directory: str, entries: Sequence[Entry]) -> FlaxNames | None:
    """What Flax has left in a directory; None: nothing of that kind.

    As for Flax, all that begins with the prefix is a checkpoint, but for what is temporary and the arrays of jobs.

    Args:
        backend: where.
        directory: of them.
        entries: what is in it.

    Raises:
        NotACheckpointError: there are several prefixes, and none of them is the one that Flax takes by itself.
    """
    kinds = {each.name: each.kind for each in entries if _may_be_one(each.name)}
    files = [name for name, kind in kinds.items() if kind != "directory" and _NUMBERED.fullmatch(name)]
    newest = next(reversed(_of_prefix(kinds, DEFAULT_PREFIX)), None)
    if any(name.startswith(DEFAULT_PREFIX) for name in files) or (
        newest is not None and kinds[newest] == "directory" and _is_orbax_item(backend, f"{directory}/{newest}")
    ):
        return FlaxNames(DEFAULT_PREFIX, _of_prefix(kinds, DEFAULT_PREFIX))
    prefix = _other_prefix(backend, directory, files)
    return None if prefix is None else FlaxNames(prefix, _of_prefix(kinds, prefix))


def certain_checkpoints(backend: Backend, directory: str, entries: Sequence[Entry]) -> list[str]:
    """The names of what nobody but Flax has left, the newest last: `flax_names`, where one of the last begins so.

    Files of others may have such names, too: who asks this would refuse them.
    """
    try:
        found = flax_names(backend, directory, entries)
    except NotACheckpointError:  # of several prefixes
        files = (each.name for each in entries if each.kind != "directory" and _may_be_one(each.name))
        found = FlaxNames("", in_flax_order(name for name in files if _NUMBERED.fullmatch(name)))
    if found is None:
        return []
    folders, last = {each.name for each in entries if each.kind == "directory"}, found.names[-_MOST_LOOKED_INTO:]
    is_certain = any(each in folders or _begins_as_state(_head(backend, directory, each)) for each in reversed(last))
    return found.names if is_certain else []


def chosen_name(directory: str, found: FlaxNames, step: float | None) -> str:
    """The name of a step; None: of the newest one.

    Raises:
        StepNotFoundError: there is no such step.
    """
    if step is None:
        return found.names[-1]
    numbers = {name: name.removeprefix(found.prefix) for name in found.names}
    same = [name for name, number in numbers.items() if _NUMBER.fullmatch(number) and float(number) == step]
    if not same:
        there = ", ".join(list(numbers.values())[-_MOST_NAMED:])
        raise StepNotFoundError(f"{directory}: has no step {step}; the last ones are {there}")
    exact = f"{found.prefix}{step}"
    return exact if exact in same else same[-1]


def _may_be_one(name: str) -> bool:
    return not name.endswith(ARRAYS_OF_A_JOB) and TEMPORARY not in name


def _of_prefix(names: Iterable[str], prefix: str) -> list[str]:
    return in_flax_order(name for name in names if name.startswith(prefix) and name != f"{prefix}tmp")


def _other_prefix(backend: Backend, directory: str, files: Sequence[str]) -> str | None:
    """The one that all files with a number at their end begin with, as far as they begin as Flax's do."""
    by_prefix: dict[str, list[str]] = {}
    for name in in_flax_order(files):
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
            f"{directory}: checkpoints of Flax with {len(newest)} prefixes, none of them {DEFAULT_PREFIX!r}, which "
            f"Flax takes by itself; expected one of them, the newest of each are {shown}"
        )
    return shortest


def _begins_as_map(backend: Backend, directory: str, name: str) -> bool:
    head = _head(backend, directory, name)
    return bool(head) and head[0] in _MAPS


def _begins_as_state(head: bytes) -> bool:
    """Whether these are the first bytes of a map with text as its first key: those of a pickle are none."""
    key = head[{0xDE: 3, 0xDF: 5}.get(head[0], 1) :] if head and head[0] in _MAPS else b""
    return begins_as_text(key)


def _head(backend: Backend, directory: str, name: str) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    try:
        return first_bytes(backend, directory, name)[0]
    except StorageError:
        return b""


def _is_orbax_item(backend: Backend, directory: str) -> bool:
    """Whether Flax has written it by Orbax, as it does by default: one item, in no step with a name of its own."""
    try:
        return not {TREE_METADATA, OCDBT}.isdisjoint(entry.name for entry in backend.list(directory))
    except StorageError:
        return False
