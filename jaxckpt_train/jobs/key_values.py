"""The contract of what the processes of one job tell each other through: keys with values that all of them reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class KeyValues(Protocol):
    """A store of small values. A key is text with `/` in it, and is written by one process. Any thread may call.

    What it does not answer in about the time that is asked, it raises as CheckpointError.
    """

    def set(self, key: str, value: bytes) -> None:
        """Give a key its value, whether or not it has one."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, as soon as there is one; None: there was none for so many seconds. 0: whether there is one now."""

    def find(self, folder: str) -> Mapping[str, bytes]:
        """The values of all keys below `folder/`, by the rest of their names."""

    def increment(self, key: str) -> int:
        """Add one to the count of a key, which begins at 0, and return it. No key is both counted and set."""

    def delete(self, folder: str) -> None:
        """Forget all keys below `folder/`."""
