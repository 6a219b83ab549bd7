"""A key-value store in memory that counts what each process asks of it: for jobs that are simulated."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


class WaitsForever(BaseException):  # no error: what a simulated process does instead of waiting
    """Raised in the only thread there is by a wait for what nobody has given yet."""


@dataclass
class Asked:
    """What one process has asked of the store.

    Attributes:
        operations: how many of each kind.
        sent_bytes: of keys and values.
        received_bytes: likewise.
    """

    operations: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0

    def __sub__(self, before: Asked) -> Asked:
        sent, received = self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes
        return Asked(self.operations - before.operations, sent, received)

    def copy(self) -> Asked:
        """As it is now."""
        return Asked(Counter(self.operations), self.sent_bytes, self.received_bytes)


class CountedValues:
    """All keys of a job.

    Args:
        waits: whether who asks for what is not there waits, as in threads of their own; else `WaitsForever` is raised.
    """

    def __init__(self, *, waits: bool) -> None:
        self.waits, self.changed = waits, threading.Condition()
        self.folders: dict[str, dict[str, bytes]] = {}
        self.counts: Counter[str] = Counter()

    def of(self, process: int) -> ValuesOfProcess:
        """As one process sees it."""
        return ValuesOfProcess(self)

    def stored(self) -> dict[str, bytes]:
        """All of it."""
        with self.changed:
            return {f"{folder}/{name}": value for folder, all_ in self.folders.items() for name, value in all_.items()}


class ValuesOfProcess:
    """`key_values.KeyValues`, of one process."""

    def __init__(self, values: CountedValues) -> None:
        self._all, self.asked = values, Asked()

    def set(self, key: str, value: bytes) -> None:
        """As the protocol says."""
        self._count("set", len(key) + len(value))
        folder, _, name = key.rpartition("/")
        with self._all.changed:
            self._all.folders.setdefault(folder, {})[name] = value
            self._all.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """As the protocol says."""
        self._count("get", len(key))
        folder, _, name = key.rpartition("/")
        end = time.monotonic() + timeout_s
        with self._all.changed:
            while (found := self._all.folders.get(folder, {}).get(name)) is None:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return None
                if not self._all.waits:
                    raise WaitsForever
                self._all.changed.wait(left_s)
        self.asked.received_bytes += len(found)
        return found

    def find(self, folder: str) -> Mapping[str, bytes]:
        """As the protocol says."""
        self._count("find", len(folder))
        with self._all.changed:
            found = dict(self._all.folders.get(folder, {}))
            for other, values in self._all.folders.items():
                if other.startswith(f"{folder}/"):
                    found.update({f"{other[len(folder) + 1 :]}/{name}": value for name, value in values.items()})
        self.asked.received_bytes += sum(len(folder) + 1 + len(name) + len(value) for name, value in found.items())
        return found

    def increment(self, key: str) -> int:
        """As the protocol says."""
        self._count("increment", len(key))
        with self._all.changed:
            self._all.counts[key] += 1
            return self._all.counts[key]

    def delete(self, folder: str) -> None:
        """As the protocol says."""
        self._count("delete", len(folder))
        with self._all.changed:
            for there in [key for key in self._all.folders if f"{key}/".startswith(f"{folder}/")]:
                del self._all.folders[there]
            for there in [key for key in self._all.counts if key.startswith(f"{folder}/")]:
                del self._all.counts[there]

    def _count(self, operation: str, sent_bytes: int) -> None:
        self.asked.operations[operation] += 1
        self.asked.sent_bytes += sent_bytes
