"""Eight kinds of damage to a file, and the choice of the file."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

Files = dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class Victim:
    """The file to damage.

    Attributes:
        name: its path.
        names: the paths of all files that may be changed.
        older: by path, the content of a file in another step or at an earlier time.
        chance: the random generator.
    """

    name: str
    names: Sequence[str]
    older: Mapping[str, bytes]
    chance: random.Random

    def other(self) -> str:
        """Return another file; for a segment another segment, if there is one."""
        others = [name for name in self.names if name != self.name]
        alike = [name for name in others if name.endswith(".safetensors")]
        return self.chance.choice(alike if alike and self.name.endswith(".safetensors") else others)


Damage = Callable[[Files, Victim], None]


def flip(files: Files, victim: Victim) -> None:
    """Flip one bit."""
    data = bytearray(files[victim.name])
    data[victim.chance.randrange(len(data))] ^= 1 << victim.chance.randrange(8)
    files[victim.name] = bytes(data)


def zero(files: Files, victim: Victim) -> None:
    """Set a range of up to 4 KiB to zeros."""
    data = bytearray(files[victim.name])
    start = victim.chance.randrange(len(data))
    stop = min(len(data), start + victim.chance.randint(1, 4096))
    data[start:stop] = bytes(stop - start)
    files[victim.name] = bytes(data)


def truncate(files: Files, victim: Victim) -> None:
    """Cut off the end."""
    files[victim.name] = files[victim.name][: victim.chance.randrange(len(files[victim.name]))]


def extend(files: Files, victim: Victim) -> None:
    """Append bytes."""
    chance = victim.chance
    files[victim.name] += chance.choice((b"\0", chance.randbytes(chance.randint(1, 5000)), files[victim.name]))


def swap(files: Files, victim: Victim) -> None:
    """Exchange the content of two files."""
    other = victim.other()
    files[victim.name], files[other] = files[other], files[victim.name]


def duplicate(files: Files, victim: Victim) -> None:
    """Copy the content of another file."""
    files[victim.name] = files[victim.other()]


def missing(files: Files, victim: Victim) -> None:
    """Remove the file."""
    del files[victim.name]


def stale(files: Files, victim: Victim) -> None:
    """Replace it by that of another step, or by an older version."""
    files[victim.name] = victim.older[victim.name]


KINDS: dict[str, Damage] = {
    each.__name__: each for each in (flip, zero, truncate, extend, swap, duplicate, missing, stale)
}


def chosen(files: Files, names: Sequence[str], by_bytes: bool, chance: random.Random) -> str:
    """Choose a file: with a probability by its size, or evenly."""
    return chance.choices(names, [len(files[name]) if by_bytes else 1 for name in names])[0]
