"""A run directory as the processes of a job know it that do not own it: by what process 0 tells them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.lineage import line_last, newest_generations
from jaxckpt_train.steps.refusals import step_not_found
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.steps.step_names import check_step


class KnownRun(Protocol):
    """What a process may ask of a run without a word to the others."""

    def newest(self) -> list[Entry]:
        """The last generation of each step, in the order of the saves; what a roll-back has left behind first."""

    def damaged(self) -> list[Entry]:
        """What was set aside since it is damaged, in the order of the saves."""

    def is_committed(self, step: int) -> bool:
        """Whether the line that the run descends from has this step."""

    def candidates(self, step: int | None) -> list[Entry]:
        """The generations of a step, or of all, the newest first; StepNotFoundError: there is none."""


class News(msgspec.Struct, array_like=True):
    """What has changed in a run since process 0 has told of it last.

    Attributes:
        entries: that are new, or not as before.
        gone: names of those that are not there any more.
        left: names of those that a roll-back has left behind.
    """

    entries: tuple[Entry, ...]
    gone: tuple[str, ...]
    left: tuple[str, ...]


class Newsroom:
    """In process 0: what the others know of its run, and so what is news to them."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._told: dict[str, Entry] = {}

    def news(self) -> News:
        """What they do not know yet; they do once this was sent."""
        now = {entry.name: entry for entry in [*self._run.entries(), *self._run.damaged()]}
        changed = tuple(entry for name, entry in now.items() if self._told.get(name) != entry)
        gone = tuple(name for name in self._told if name not in now)
        self._told = now
        return News(changed, gone, tuple(sorted(self._run.left())))


class FollowedRun:
    """What process 0 has told. As long as that is nothing, this looks at the disk as any reader does.

    Args:
        reader: of the same directory.
        directory: its path.
    """

    def __init__(self, reader: RunDirectory, directory: str) -> None:
        self._reader = reader
        self._entries: dict[str, Entry] | None = None
        self._left: frozenset[str] = frozenset()
        self._directory, self._guard = directory, threading.Lock()

    def hear(self, news: News) -> None:
        """Take note of what process 0 has told."""
        with self._guard:
            known = {} if self._entries is None else self._entries
            known = {name: entry for name, entry in known.items() if name not in news.gone}
            self._entries = known | {entry.name: entry for entry in news.entries}
            self._left = frozenset(news.left)

    def committed(self, entry: Entry, gone: Sequence[str]) -> None:
        """Take note of a save that was committed, of which no news have come yet, and of what nobody keeps since."""
        with self._guard:
            there = {name: each for name, each in (self._entries or {}).items() if name not in gone}
            self._entries = there | {entry.name: entry}
            self._left = frozenset(entry.left_behind) - {entry.name}

    def _known(self) -> list[Entry] | None:
        """All that are whole, in order."""
        with self._guard:
            if self._entries is None:
                return None
            return line_last([each for each in self._entries.values() if each.damaged is None], self._left)

    def newest(self) -> list[Entry]:
        """As `KnownRun` says."""
        known = self._known()
        return self._reader.newest() if known is None else newest_generations(known)

    def damaged(self) -> list[Entry]:
        """As `KnownRun` says."""
        with self._guard:
            entries = self._entries
        if entries is None:
            return self._reader.damaged()
        return sorted((each for each in entries.values() if each.damaged is not None), key=lambda each: each.order)

    def is_committed(self, step: int) -> bool:
        """As `KnownRun` says."""
        known = self._known()
        if known is None:
            return self._reader.is_committed(step)
        return any(entry.step == step and entry.name not in self._left for entry in known)

    def candidates(self, step: int | None) -> list[Entry]:
        """As `KnownRun` says."""
        known = self._known()
        if known is None:
            return self._reader.candidates(step)
        wanted = None if step is None else check_step(step)
        found = [entry for entry in reversed(known) if wanted in (None, entry.step)]
        if not found:
            raise step_not_found(self._directory, step, known)
        return found
