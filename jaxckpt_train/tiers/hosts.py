"""The hosts of a job: which processes share one, where each serves its files, and who keeps whose copies or parity."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

Redundancy = Literal["none", "partner", "xor", "p+q"]
LARGEST_SET = 8  # more members need less space, and more hosts for a rebuild
_LEAST_MEMBERS = {"xor": 2, "p+q": 3}


class Host(msgspec.Struct, array_like=True, frozen=True):
    """A process of the job as the others see it.

    Attributes:
        process: its number.
        domain: what is lost together: the machine, or what the user says.
        machine: the machine. Processes with the same domain and machine are on one host, and have one directory.
        directory: the directory of the fast tier.
        address: where it serves the files of its host; None: nowhere.
        redundancy: what its settings ask for.
    """

    process: int
    domain: str
    machine: str = ""
    directory: str = ""
    address: tuple[str, int] | None = None
    redundancy: Redundancy = "none"


class Hosts:
    """All processes of a job by their hosts; the same in every process."""

    def __init__(self, found: Sequence[Host]) -> None:
        self.all = tuple(found)
        self._by_domain: dict[str, list[int]] = {}
        self._leaders: dict[tuple[str, str], int] = {}
        for each in found:
            self._by_domain.setdefault(each.domain, []).append(each.process)
            self._leaders.setdefault((each.domain, each.machine), each.process)

    @property
    def domains(self) -> int:
        """The number of domains."""
        return len(self._by_domain)

    def leader(self, process: int) -> int:
        """The first process on the host of a process. It does what is done once for each host."""
        return self._leaders[self.all[process].domain, self.all[process].machine]

    def leaders(self) -> list[int]:
        """The leader of each host."""
        return [*self._leaders.values()]

    def divided_host(self) -> Host | None:
        """A process whose directory is not that of the other processes of its host; None: there is none."""
        leaders = {each.process: self.all[self.leader(each.process)] for each in self.all}
        return next((each for each in self.all if each.directory != leaders[each.process].directory), None)

    def protection(self, wanted: Redundancy) -> Protection:
        """Who keeps what of whom. Where there are too few domains for parity, copies take its place.

        Copies go to the process of the same rank in the next domain, and a parity set has processes of one rank, each
        in a domain of its own. So the loss of a domain takes one copy, and one member of a set.
        """
        copies, sets = dict[int, int](), list[tuple[int, ...]]()
        if wanted == "none" or self.domains == 1:
            return Protection(wanted, {}, ())
        for rank in range(max(map(len, self._by_domain.values()))):
            column = [processes[rank] for processes in self._by_domain.values() if len(processes) > rank]
            if len(column) >= _LEAST_MEMBERS.get(wanted, len(column) + 1):
                sets += _divided(column)
            else:
                copies |= {process: self._in_next_domain(process, rank) for process in column}
        return Protection(wanted, copies, tuple(sets))

    def _in_next_domain(self, process: int, rank: int) -> int:
        domains = list(self._by_domain)
        place = domains.index(self.all[process].domain)
        there = self._by_domain[domains[(place + 1) % len(domains)]]
        return there[rank % len(there)]


class Protection(msgspec.Struct, frozen=True, dict=True):
    """Who keeps what of whom.

    Attributes:
        kind: what was asked for.
        copies: the process that keeps a copy of the files of each process that has one.
        sets: the members of each parity set.
    """

    kind: Redundancy
    copies: dict[int, int]
    sets: tuple[tuple[int, ...], ...]

    def copied_by(self, process: int) -> list[int]:
        """The processes of whose files this one keeps a copy."""
        return [each for each, keeper in self.copies.items() if keeper == process]

    def set_of(self, process: int) -> tuple[int, ...] | None:
        """The parity set of a process; None: it has none."""
        return self._sets.get(process)

    @functools.cached_property
    def _sets(self) -> dict[int, tuple[int, ...]]:
        return {process: members for members in self.sets for process in members}

    def survives(self) -> int:
        """How many domains may be lost, wherever they are."""
        if not self.copies and not self.sets:
            return 0
        return 2 if self.kind == "p+q" and not self.copies else 1


def _divided(column: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide processes into sets of about the same size."""
    number = -(-len(column) // LARGEST_SET)
    bounds = [len(column) * place // number for place in range(number + 1)]
    return [tuple(column[start:end]) for start, end in itertools.pairwise(bounds)]
