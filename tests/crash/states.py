"""Crash states: what a disk may hold after the power went at some moment, by what had been synced until then.

Two kinds of file system:

"ordered": changes of names reach the disk in the order in which they were made, as with a journal (ext4, xfs). Syncing
    a directory takes with it all that came before the last change in that directory.
"any": of the changes of names that were not synced, any may be there and any missing, whatever came first.

On both, bytes of a file that were not synced may be there or not in blocks of 4 KiB, some of which end anywhere, and
its size may be any between those that it had since; bytes and names know nothing of each other. What is missing reads
as what was there before, or as zeros.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from tests.crash.image import DataChange, Image, NameChange, Operation, Sync, Truncate, Write, folders_of

BLOCK = 4096
SOMEWHERE = 0.2
Order = Literal["ordered", "any"]


def crash_state(start: Image, log: Sequence[Operation], moment: int, order: Order, chance: random.Random) -> Image:
    """One of the states that the disk may be in if the power goes after so many operations."""
    done = log[:moment]
    image = start.copy()
    survivors = _ordered_names(done, chance) if order == "ordered" else _any_names(done, chance)
    for index in survivors:
        image.apply(done[index])
    for inode, changes in _data_changes(done).items():
        _apply_data(image, inode, changes, chance)
    return image


def _ordered_names(done: Sequence[Operation], chance: random.Random) -> list[int]:
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
    return durable + later[: chance.randint(0, len(later))]


def _any_names(done: Sequence[Operation], chance: random.Random) -> list[int]:
    synced: dict[int, int] = {each.inode: index for index, each in enumerate(done) if isinstance(each, Sync)}
    share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    survivors = []
    for index, each in enumerate(done):
        if isinstance(each, NameChange):
            is_durable = all(synced.get(folder, -1) > index for folder in folders_of(each))
            if is_durable or chance.random() < share:
                survivors.append(index)
    return survivors


def _data_changes(done: Sequence[Operation]) -> dict[int, list[tuple[bool, DataChange]]]:
    """Of each file what was done to its bytes, and whether that was synced."""
    synced: dict[int, int] = {each.inode: index for index, each in enumerate(done) if isinstance(each, Sync)}
    changes: dict[int, list[tuple[bool, DataChange]]] = {}
    for index, each in enumerate(done):
        if isinstance(each, DataChange):
            changes.setdefault(each.inode, []).append((synced.get(each.inode, -1) > index, each))
    return changes


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
    """The parts of a write that lie in one block each."""
    pieces, at = [], 0
    while at < len(change.data):
        end = min(len(change.data), at + BLOCK - (change.offset + at) % BLOCK)
        pieces.append(Write(change.inode, change.offset + at, change.data[at:end]))
        at = end
    return pieces
