"""The files of steps of the fast tier, wherever they are: on this host, on another one, or to be rebuilt from parity.

`HostFiles` opens a file by its path on this host. A file may have several copies. Each block is checked against its
digest by the reader, which asks for the next copy where one is wrong (`Replicated`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np
import xxhash

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backends.base import Source, is_damage, storage_error
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.backends.peers import Peer
from jaxckpt_train.store.buffers import aligned_buffer
from jaxckpt_train.store.files import read_opened
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME, NOT_JSON
from jaxckpt_train.tiers.parity import Kind, Reader, Stripes, rebuild, stream_reader

LAYOUT_NAME = ".tier.json"
MAX_LAYOUT_BYTES = 256 << 20
_MOST_LAYOUTS = 16
_log = logging.getLogger("jaxckpt_train")
C = TypeVar("C")
T = TypeVar("T")
Name = tuple[str, int]  # the path of a file in its step, and its size


class HeldStep(msgspec.Struct, frozen=True):
    """What one host has of a step: whether COMMIT and manifest are intact, and the sizes of its files by path."""

    name: str
    is_intact: bool
    files: dict[str, int]


class Layout(msgspec.Struct, frozen=True, dict=True):
    """How the files of a step are protected; stored with the step on each host.

    Attributes:
        kind: of the parity.
        files: the files that each process has written, in the order of its stream.
        sets: the members of each parity set.
    """

    kind: Kind
    files: dict[int, list[Name]]
    sets: list[list[int]]

    def stripes(self, members: Sequence[int]) -> Stripes:
        """How the streams of a set are cut."""
        return Stripes(self.kind, tuple(sum(size for _, size in self.files[each]) for each in members))

    def writer_of(self, path: str) -> int | None:
        """The process that has written a file."""
        return self._writers.get(path)

    @functools.cached_property
    def _writers(self) -> dict[str, int]:
        return {path: process for process, names in self.files.items() for path, _ in names}

    @functools.cached_property
    def _sets(self) -> dict[int, list[int]]:
        return {process: members for members in self.sets for process in members}

    def set_of(self, process: int) -> list[int] | None:
        """The parity set of a process; None: it has none."""
        return self._sets.get(process)

    def size_of(self, path: str) -> int | None:
        """The size of a file that a process has written."""
        writer = self.writer_of(path)
        return None if writer is None else dict(self.files[writer])[path]


def encode_layout(layout: Layout) -> bytes:
    """The content of a layout file: its digest, and JSON."""
    data = msgspec.json.encode(layout)
    return xxhash.xxh3_128_hexdigest(data).encode() + b"\n" + data


def decode_layout(data: bytes, path: str) -> Layout:
    """Decode a layout file. Raises CorruptCheckpointError: it is damaged."""
    digest, _, content = data.partition(b"\n")
    if xxhash.xxh3_128_hexdigest(content).encode() != digest:
        raise CorruptCheckpointError(f"{path}: damaged: its digest is not that of its content")
    try:
        return msgspec.json.decode(content, type=Layout)
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{path}: expected a layout: {error}") from error


def _read_layout(copy: Callable[[], Source], path: str) -> Layout:
    with contextlib.closing(copy()) as source:
        return decode_layout(read_opened(source, path, MAX_LAYOUT_BYTES).tobytes(), path)


def parity_name(which: Literal["p", "q"], process: int) -> str:
    """The file with a parity of the stripe whose P the process `process` holds."""
    return f".tier-{which}-{process:05d}"


class HostFiles(LocalBackend):
    """A local backend that also finds the files of steps below `root` on other hosts.

    Attributes:
        root: the directory of the fast tier on this host.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._holders: dict[str, list[tuple[HeldStep, Peer]]] = {}
        self._layouts: dict[str, Layout] = {}
        self._intact: Collection[str] | None = None

    def know(self, own: Sequence[HeldStep], held: Mapping[Peer, Sequence[HeldStep]]) -> None:
        """Set what this host has, and what the others have."""
        self._holders, self._layouts, self._intact = {}, {}, {step.name for step in own if step.is_intact}
        for peer, steps in held.items():
            for step in steps:
                self._holders.setdefault(step.name, []).append((step, peer))

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        """Open a file of this host, or one of its copies on other hosts."""
        step, path = self._in_tier(f"{directory}/{name}")
        if step is None:
            return super().open(directory, name, direct=direct)
        here: Callable[[], Source] = functools.partial(self.open_here, directory, name, direct)
        if path in (COMMIT_NAME, MANIFEST_NAME, LAYOUT_NAME):
            copies = self._copies_elsewhere(step, path)
            is_intact = self._intact is None or step in self._intact or not copies
            return _first_of([here, *copies] if is_intact else copies, None)
        copies = [here, *self._copies_elsewhere(step, path), *self._rebuilt(step, path)]
        return _first_of(copies, self._size(step, path))

    def _copies_elsewhere(self, step: str, path: str) -> list[Callable[[], Source]]:
        return [functools.partial(peer.open, f"{step}/{path}") for peer in self._having(step, path)]

    def _size(self, step: str, path: str) -> int | None:
        """The size of a file of a step; None: it is not known."""
        layout = self.layout(step)
        return None if layout is None else layout.size_of(path)

    def _in_tier(self, full: str) -> tuple[str | None, str]:
        if not full.startswith(f"{self.root}/"):
            return None, full
        step, _, path = full.removeprefix(f"{self.root}/").partition("/")
        return (step, path) if path else (None, full)

    def _having(self, step: str, path: str) -> list[Peer]:
        """The other hosts that have a file, of the right size if that is known."""
        is_metadata = path in (COMMIT_NAME, MANIFEST_NAME, LAYOUT_NAME)
        size = None if is_metadata else self._size(step, path)
        able = [(held, peer) for held, peer in self._holders.get(step, ()) if held.is_intact or not is_metadata]
        holders = [(held.files.get(path), peer) for held, peer in able]
        return [peer for found, peer in holders if found is not None and size in (None, found)]

    def here(self) -> LocalBackend:
        """Opens only what is on this host."""
        return LocalBackend()

    def open_here(self, directory: str, name: str, direct: bool | Literal["auto"] = False) -> Source:
        """Open a file of this host."""
        return super().open(directory, name, direct=direct)

    def layout(self, step: str) -> Layout | None:
        """How a step is protected; None: no host has an intact layout. Raises StorageError: a host does not answer."""
        if step not in self._layouts:
            here: Callable[[], Source] = functools.partial(self.open_here, f"{self.root}/{step}", LAYOUT_NAME)
            copies = (here, *self._copies_elsewhere(step, LAYOUT_NAME))
            try:
                found = _first(copies, functools.partial(_read_layout, path=f"{self.root}/{step}/{LAYOUT_NAME}"))
            except (StorageError, CorruptCheckpointError) as error:
                if not is_damage(error):
                    raise
            else:
                if len(self._layouts) >= _MOST_LAYOUTS:
                    self._layouts = {}
                self._layouts[step] = found[1]
        return self._layouts.get(step)

    def _rebuilt(self, step: str, path: str) -> list[Callable[[], Source]]:
        """The ways to rebuild a file; with P and Q, also those that distrust one member more."""
        layout = self.layout(step)
        writer = None if layout is None else layout.writer_of(path)
        members = None if layout is None or writer is None else layout.set_of(writer)
        if layout is None or members is None:
            return []
        others = [None, *(each for each in members if each != writer)] if layout.kind == "p+q" else [None]
        return [functools.partial(self._rebuild, step, layout, members, path, each) for each in others]

    def _rebuild(self, step: str, layout: Layout, members: Sequence[int], path: str, distrusted: int | None) -> Source:
        writer = layout.writer_of(path)
        lost = [place for place, each in enumerate(members) if not self._is_whole(step, layout, each)]
        lost += [place for place, each in enumerate(members) if each in (writer, distrusted)]
        return _RebuiltSource(self, step, layout, members, path, frozenset(lost))

    def _is_whole(self, step: str, layout: Layout, process: int) -> bool:
        """Whether all files of a process are on some host."""
        return all(self._is_somewhere(step, path) for path, _ in layout.files[process])

    def _is_somewhere(self, step: str, path: str) -> bool:
        if self._having(step, path):  # as its host says: if the network does not reach that now, it is not lost
            return True
        try:
            source = self.open_here(f"{self.root}/{step}", path)
        except StorageError as error:
            if not is_damage(error):
                raise
            return False
        source.close()
        return source.size == self._size(step, path)

    def open_copy(self, step: str, path: str) -> Source:
        """Open a file without rebuilding it."""
        here: Callable[[], Source] = functools.partial(self.open_here, f"{self.root}/{step}", path)
        return _first_of([here, *self._copies_elsewhere(step, path)], self._size(step, path))

    def is_complete(self, step: str) -> bool:
        """Whether each file of a step is on some host, or can be rebuilt."""
        layout = self.layout(step)
        if layout is None:
            return False
        for process in layout.files:
            if self._is_whole(step, layout, process):
                continue
            members = layout.set_of(process)
            if members is None:
                return False
            missing = [each for each in members if not self._is_whole(step, layout, each)]
            if len(missing) > layout.stripes(members).parities:
                return False
        return True


def _first_of(copies: Sequence[Callable[[], Source]], size: int | None) -> Source:
    """The first copy of this size (None: of any) that can be opened, and those after it. Raises as `_first`."""

    def opened(copy: Callable[[], Source]) -> Source:
        source = copy()
        if size is None or source.size == size:
            return source
        source.close()
        raise CorruptCheckpointError(f"a copy has {source.size} bytes, expected {size}")

    number, source = _first(copies, opened)
    return source if number + 1 == len(copies) else _ReplicatedSource(source, copies[number + 1 :])


def _first(choices: Iterable[C], use: Callable[[C], T]) -> tuple[int, T]:
    """Use the first choice that can be used; return its place, and the result.

    If none can, raises the first error that says nothing about the file, such as that of a network; or the first one.
    """
    errors = list[StorageError | CorruptCheckpointError]()
    for number, choice in enumerate(choices):
        try:
            return number, use(choice)
        except (StorageError, CorruptCheckpointError) as error:
            errors.append(error)
    raise next((error for error in errors if not is_damage(error)), errors[0])


class _ReplicatedSource:
    """A file with further copies, which are opened when they are needed; a `Source`, and `Replicated`."""

    identity = None

    def __init__(self, source: Source, others: Sequence[Callable[[], Source]]) -> None:
        self._source, self._others = source, others
        self.size, self.modified_ns, self.alignment = source.size, source.modified_ns, source.alignment
        self._order = [*range(1 + len(others))]  # the one that was read last comes first: another one may be silent
        self.copies = len(self._order) + 1  # the last one is `source` again: it may not be what was read

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        def read(number: int) -> None:
            if number:
                self.read_copy(number, offset, data[:needed])
            else:
                self._source.read_into(offset, data, needed)

        order = self._order
        place, _ = _first(order, read)
        if place:
            self._order = [*order[place:], *order[:place]]

    def read_copy(self, number: int, offset: int, data: np.ndarray) -> None:
        """Fill a flat uint8 array from another copy."""
        if number > len(self._others):
            start = offset // self.alignment * self.alignment
            memory = aligned_buffer(-(-(offset + len(data) - start) // self.alignment) * self.alignment)
            self._source.read_into(start, memory, offset + len(data) - start)
            data[:] = memory[offset - start :][: len(data)]
            return
        with contextlib.closing(self._others[number - 1]()) as source:
            if source.size != self.size:
                raise CorruptCheckpointError(f"a copy has {source.size} bytes, expected {self.size}")
            source.read_into(offset, data, len(data))

    def close(self) -> None:
        self._source.close()


class _RebuiltSource:
    """A file that is computed from the other members of its parity set; a `Source`."""

    alignment, modified_ns = 1, 0

    def __init__(
        self, files: HostFiles, step: str, layout: Layout, members: Sequence[int], path: str, lost: Collection[int]
    ) -> None:
        self._files, self._step, self._layout, self._members, self._lost = files, step, layout, members, lost
        self._stripes = layout.stripes(members)
        self._member = next(place for place, each in enumerate(members) if path in dict(layout.files[each]))
        names = layout.files[members[self._member]]
        place = [name for name, _ in names].index(path)
        self._start, self.size = sum(size for _, size in names[:place]), names[place][1]
        if len(lost) > self._stripes.parities:
            what = f"{len(lost)} of the {len(members)} members of its parity set are lost"
            raise storage_error(errno.ENOENT, "rebuild the file", f"{files.root}/{step}/{path}", what)
        _log.debug("%s/%s is rebuilt from parity", step, path)

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        with contextlib.ExitStack() as opened:
            readers: dict[str, Source] = {}

            def read(path: str, at: int, target: np.ndarray) -> None:
                if path not in readers:
                    source = self._files.open_copy(self._step, path)
                    readers[path] = opened.enter_context(contextlib.closing(source))
                readers[path].read_into(at, target, len(target))

            def chunk_of(member: int, stripe: int) -> Reader:
                names, start = self._layout.files[self._members[member]], self._stripes.offset(member, stripe)
                stream = stream_reader(
                    [size for _, size in names], [functools.partial(read, path) for path, _ in names]
                )
                return lambda at, target: stream(start + at, target)

            def parity_of(stripe: int, which: Literal["p", "q"]) -> Reader:
                return functools.partial(read, parity_name(which, self._members[stripe]))

            start = self._start + offset
            rebuild(self._stripes, self._lost, self._member, start, data[:needed], chunk_of, parity_of)

    def close(self) -> None:
        """Nothing is held."""
