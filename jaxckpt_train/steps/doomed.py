"""Which steps of a run are about to be deleted, and which of these wait for the disk to keep what replaces them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence


class Doomed:
    """The names of their directories.

    None of them is listed. Those that wait stay for a while, and for ever if the disk does not keep what replaces them:
    they can be restored and pinned, and are then kept again.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._waiting: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, names: Collection[str], *, wait: bool) -> None:
        """They are about to be deleted; `wait`: something else has to be on the disk before."""
        self._names.update(names)
        self._waiting.update(names if wait else ())

    def discard(self, names: Iterable[str]) -> None:
        """They are gone, or kept again."""
        found = [*names]
        self._names.difference_update(found)
        self._waiting.difference_update(found)

    def is_going(self, name: str) -> bool:
        """Whether it may be gone at any moment."""
        return name in self._names and name not in self._waiting

    def let_go(self, names: Sequence[str], kept: Collection[str]) -> list[str]:
        """These have waited: those of them that somebody has kept again do not go, the others do now."""
        self.discard(name for name in names if name in kept)
        going = [name for name in names if name not in kept]
        self._names.update(going)  # somebody may have kept them for a while only
        self._waiting.difference_update(going)
        return going
