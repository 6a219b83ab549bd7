"""What may become of a file: eight kinds of damage, and how the file is chosen."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

Files = dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class Victim:
    """The file that was chosen.

    Attributes:
        name: its path.
        names: of all that may be changed.
        older: by path, what a file was in another step, or at an earlier time.
        chance: what is left to it.
    """

    name: str
    names: Sequence[str]
    older: Mapping[str, bytes]
    chance: random.Random

    def other(self) -> str:
        """Another file; of a segment another segment, if there is one."""
        others = [name for name in self.names if name != self.name]
        alike = [name for name in others if name.endswith(".safetensors")]
        return self.chance.choice(alike if alike and self.name.endswith(".safetensors") else others)


Damage = Callable[[Files, Victim], None]


def flip(files: Files, victim: Victim) -> None:
    """One bit."""
    data = bytearray(files[victim.name])
    data[victim.chance.randrange(len(data))] ^= 1 << victim.chance.randrange(8)
    files[victim.name] = bytes(data)


def zero(files: Files, victim: Victim) -> None:
    """A range of up to 4 KiB."""
    data = bytearray(files[victim.name])
    start = victim.chance.randrange(len(data))
    stop = min(len(data), start + victim.chance.randint(1, 4096))
    data[start:stop] = bytes(stop - start)
    files[victim.name] = bytes(data)


def truncate(files: Files, victim: Victim) -> None:
    """The end is gone."""
    files[victim.name] = files[victim.name][: victim.chance.randrange(len(files[victim.name]))]


def extend(files: Files, victim: Victim) -> None:
    """There is more than was written."""
    chance = victim.chance
    files[victim.name] += chance.choice((b"\0", chance.randbytes(chance.randint(1, 5000)), files[victim.name]))


def swap(files: Files, victim: Victim) -> None:
    """Two files have changed places."""
    other = victim.other()
    files[victim.name], files[other] = files[other], files[victim.name]


def duplicate(files: Files, victim: Victim) -> None:
    """One file has the content of another."""
    files[victim.name] = files[victim.other()]


def missing(files: Files, victim: Victim) -> None:
    """It is gone."""
    del files[victim.name]


def stale(files: Files, victim: Victim) -> None:
    """It is that of another step, or of before."""
    files[victim.name] = victim.older[victim.name]


KINDS: dict[str, Damage] = {
    each.__name__: each for each in (flip, zero, truncate, extend, swap, duplicate, missing, stale)
}


def chosen(files: Files, names: Sequence[str], by_bytes: bool, chance: random.Random) -> str:
    """One of these files: every byte as likely as any other, or every file."""
    return chance.choices(names, [len(files[name]) if by_bytes else 1 for name in names])[0]
