"""Crash states: the possible contents of a disk after a power failure, given the syncs before it.

Two kinds of file system:

"ordered": changes of names reach the disk in their order, as with a journal (ext4, xfs). A sync of a directory
    also makes all changes durable that precede the last change in that directory.
"any": any unsynced change of a name may be present or missing, in any order.

A name may refer to an inode that never reached the disk (its first name was lost, a later one was not). A repair of the
file system removes such a name, or makes it refer to an empty file, or every use of it is refused.

On both, unsynced bytes of a file may be present or missing in blocks of 4 KiB, some of them cut anywhere, and its size
may be any between the sizes that it had since. Bytes and names are independent. Missing bytes read as the previous
content, or as zeros.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Literal

from tests.nightly.crash.image import (
    DataChange,
    FailedSync,
    Image,
    Link,
    NameChange,
    Operation,
    Sync,
    Truncate,
    Write,
    folders_of,
)

BLOCK = 4096
SOMEWHERE = 0.2
Order = Literal["ordered", "any"]


def crash_state(start: Image, log: Sequence[Operation], moment: int, order: Order, chance: random.Random) -> Image:
    """Return one possible state of the disk after a power failure at `moment` operations."""
    done = log[:moment]
    image = start.copy()
    survivors = _ordered_names(done, chance) if order == "ordered" else _any_names(done, chance)
    for index in survivors:
        image.apply(done[index])
    for inode, changes in _data_changes(done).items():
        _apply_data(image, inode, changes, chance)
    _mend(image, done, chance)
    return image


def durable_state(start: Image, log: Sequence[Operation], moment: int, order: Order) -> Image:
    """Return only the durable content of the disk after `moment` operations."""
    done = log[:moment]
    image = start.copy()
    for index in _ordered_names(done, None) if order == "ordered" else _any_names(done, None):
        image.apply(done[index])
    for changes in _data_changes(done).values():
        for is_durable, change in changes:
            if is_durable:
                image.apply(change)
    _mend(image, done, None)
    return image


def _mend(image: Image, done: Sequence[Operation], chance: random.Random | None) -> None:
    """Decide the result of each name whose inode never reached the disk."""
    made = {each.inode: each.is_directory for each in done if isinstance(each, Link)}
    for each in done:
        if isinstance(each, Sync) and each.inode in made:
            image.make(each.inode, made[each.inode])
    there = (image.folders, image.files, image.lost)
    for names in list(image.folders.values()):
        for name, inode in list(names.items()):
            if not any(inode in each for each in there):
                _mend_one(image, names, name, made[inode], chance)


def _mend_one(image: Image, names: dict[str, int], name: str, is_directory: bool, chance: random.Random | None) -> None:
    found = "gone" if chance is None else chance.choice(("gone", "empty", "refused"))
    if found == "gone":
        del names[name]
    elif found == "empty":
        image.make(names[name], is_directory)
    else:
        image.lost[names[name]] = is_directory


def _ordered_names(done: Sequence[Operation], chance: random.Random | None) -> list[int]:
    names = [index for index, each in enumerate(done) if isinstance(each, NameChange)]
    last_in: dict[int, int] = {}
    floor = -1
    for index, each in enumerate(done):
        if isinstance(each, Sync):
            floor = max(floor, last_in.get(each.inode, -1))
        elif isinstance(each, NameChange):
            for folder in folders_of(each):
                last_in[folder] = index
    durable = [index for index in names if index <= floor]
    later = [index for index in names if index > floor]
    return durable + later[: 0 if chance is None else chance.randint(0, len(later))]


def _any_names(done: Sequence[Operation], chance: random.Random | None) -> list[int]:
    synced: dict[int, int] = {each.inode: index for index, each in enumerate(done) if isinstance(each, Sync)}
    share = 0.0 if chance is None else chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    survivors = []
    for index, each in enumerate(done):
        if isinstance(each, NameChange):
            is_durable = all(synced.get(folder, -1) > index for folder in folders_of(each))
            if is_durable or (chance is not None and chance.random() < share):
                survivors.append(index)
    return survivors


def _data_changes(done: Sequence[Operation]) -> dict[int, list[tuple[bool, DataChange]]]:
    """Return the changes of the bytes of each file, and whether each is synced."""
    synced: dict[int, int] = {each.inode: index for index, each in enumerate(done) if isinstance(each, Sync)}
    failed = {each.inode for each in done if isinstance(each, FailedSync)}
    changes: dict[int, list[tuple[bool, DataChange]]] = {}
    for index, each in enumerate(done):
        if isinstance(each, DataChange) and each.inode not in failed:
            changes.setdefault(each.inode, []).append((synced.get(each.inode, -1) > index, each))
    for inode in failed:
        changes[inode] = _after_failures(each for each in done if _file_of(each) == inode)
    return changes


def _file_of(operation: Operation) -> int | None:
    """Return the file whose bytes an operation concerns."""
    return operation.inode if isinstance(operation, (Write, Truncate, Sync, FailedSync)) else None


def _after_failures(done: Iterable[Operation]) -> list[tuple[bool, DataChange]]:
    """Return the changes of a file after a failed sync, by block, and whether each is synced."""
    changes: list[tuple[bool, DataChange]] = []
    dirty: set[int | None] = set()
    for each in done:
        match each:
            case Write():
                pieces = _blocks(each)
                changes += [(False, piece) for piece in pieces]
                dirty |= {_block_of(piece) for piece in pieces}
            case Truncate():
                changes.append((False, each))
                dirty.add(None)
            case Sync():
                changes = [(is_there or _block_of(change) in dirty, change) for is_there, change in changes]
                dirty.clear()
            case FailedSync():
                dirty &= {None}
    return changes


def _block_of(change: DataChange) -> int | None:
    """Return the block of a write; None for a size, which the journal keeps."""
    return change.offset // BLOCK if isinstance(change, Write) else None


def _apply_data(image: Image, inode: int, changes: Sequence[tuple[bool, DataChange]], chance: random.Random) -> None:
    for is_durable, change in changes:
        if is_durable:
            image.apply(change)
    later = [change for is_durable, change in changes if not is_durable]
    if not later:
        return
    file = image.files.setdefault(inode, bytearray())
    sizes = [len(file)]
    for change in later:
        sizes.append(_size_after(sizes[-1], change))
    size, share = chance.choice(sizes), chance.choice((0.0, 0.5, 1.0))
    if chance.random() < SOMEWHERE:
        size = chance.randint(min(sizes), max(sizes))
    for change in later:
        if isinstance(change, Write):
            for piece in _blocks(change):
                if chance.random() < share:
                    image.apply(_cut(piece, chance) if chance.random() < SOMEWHERE else piece)
    image.apply(Truncate(inode, size))


def _cut(piece: Write, chance: random.Random) -> Write:
    return Write(piece.inode, piece.offset, piece.data[: chance.randint(0, len(piece.data))])


def _size_after(size: int, change: DataChange) -> int:
    return change.size if isinstance(change, Truncate) else max(size, change.offset + len(change.data))


def _blocks(change: Write) -> list[Write]:
    """Split a write at the borders of blocks."""
    pieces, at = [], 0
    while at < len(change.data):
        end = min(len(change.data), at + BLOCK - (change.offset + at) % BLOCK)
        pieces.append(Write(change.inode, change.offset + at, change.data[at:end]))
        at = end
    return pieces
