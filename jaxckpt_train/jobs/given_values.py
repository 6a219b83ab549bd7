"""What all processes give to process 0 in a meeting: small values are listed together, large ones lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxckpt_train.jobs.key_values import KeyValues

SMALL_BYTES = 512
PACK = 32  # large values that are read at once: together they must stay below the 2 GiB of one answer
_HERE, _APART = b"=", b">"


class GivenValues:
    """The values of one meeting. Process 0 may look for them again and again: it reads a large one once.

    Args:
        values: through which the processes talk.
        folder: of the keys of the meeting.
        processes: how many there are.
    """

    def __init__(self, values: KeyValues, folder: str, processes: int) -> None:
        self._values, self._folder, self._processes = values, folder, processes
        self._read: dict[int, bytes] = {}  # large ones

    def give(self, process: int, value: bytes, *, listed: bool = False) -> None:
        """Give the value of a process; `listed` says that process 0 is to see it at its next look, however large."""
        is_small = listed or len(value) <= SMALL_BYTES
        if not is_small:
            self._values.set(f"{self._folder}/large/{process // PACK}/{process}", value)
        self._values.set(f"{self._folder}/from/{process}", _HERE + value if is_small else _APART)

    def look(self) -> dict[int, bytes | None]:
        """Who has given one so far; and the value, or None if it lies apart. Packs that are full are read meanwhile."""
        listed = numbered(self._values.find(f"{self._folder}/from"))
        found = {process: None if each[:1] == _APART else each[1:] for process, each in listed.items()}
        apart: dict[int, int] = {}
        for process, value in found.items():
            if value is None and process not in self._read:
                apart[process // PACK] = apart.get(process // PACK, 0) + 1
        for pack, count in apart.items():
            first = max(1, pack * PACK)  # process 0 gives none
            if count == min((pack + 1) * PACK, self._processes) - first:
                self._read_pack(pack)
        return found

    def of(self, found: Mapping[int, bytes | None]) -> Iterator[bytes]:
        """All values, in the order of the processes, all of whom a look has found; each is held until it is taken."""
        for process in range(1, self._processes):
            value = found[process]
            if value is None and process not in self._read:
                self._read_pack(process // PACK)
            yield self._read.pop(process) if value is None else value

    def _read_pack(self, pack: int) -> None:
        folder = f"{self._folder}/large/{pack}"
        self._read.update(numbered(self._values.find(folder)))
        self._values.delete(folder)

    def forget(self) -> None:
        """They are not needed any more."""
        self._values.delete(f"{self._folder}/from")
        self._values.delete(f"{self._folder}/large")


def numbered(found: Mapping[str, bytes]) -> dict[int, bytes]:
    """By the numbers that the names are."""
    return {int(name): value for name, value in found.items()}
