"""Entries: what a run directory knows of each committed step.

This module has the names of step directories, the `Entry` of a committed step, the result of a restore, and the lineage
of a run: which steps it descends from, which ones a roll-back has left behind, and which step may be saved next. A name
is `step-0000000100`, `step-0000000100.g1` for the next generation of the same step, or on object stores
`step-0000000100.TOKEN`, with a token that no other attempt has.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jaxckpt_train._validation import whole
from jaxckpt_train.errors import CheckpointExistsError, SettingsError
from jaxckpt_train.policies.context import CheckpointInfo
from jaxckpt_train.store.manifest import metrics_from_json

_MAX_CHANGES = 1 << 53
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
MAX_STEP = 10**15
_DIGITS = 6
MAX_GENERATION = 10**_DIGITS - 1
_NAME = re.compile(
    rf"step-(?P<step>[0-9]{{10,16}})(\.g(?P<generation>[1-9][0-9]{{0,{_DIGITS - 1}}})|\.(?P<token>[0-9a-f]{{16}}))?"
)
UNKNOWN_SAVES = 1 << 20  # more saves than any run has between two steps
_check_step = whole(0, MAX_STEP - 1)


def count_of(value: object) -> int | None:
    """A number of changes as read from a file; None: the value is not a valid count."""
    return value if type(value) is int and 0 <= value < _MAX_CHANGES else None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One committed generation of a step."""

    name: str  # of its directory
    step: int
    generation: int
    sequence: int  # the number of the save within the run: orders steps by the time of the save, also after a roll-back
    time: datetime
    metrics: Mapping[str, float] | None
    temporary: bool
    run: str | None = None  # the id of the run that saved it
    left_behind: tuple[str, ...] = ()  # the names of the directories that a roll-back before this save left behind
    record_number: int = 0  # the number of changes that the run record had when it was saved
    has_lineage: bool = True  # its manifest could be read, and belongs to the run of this directory
    is_certain: bool = True  # its manifest matches its COMMIT; otherwise its content is unreliable
    is_held: bool = False  # its manifest or the run record could not be read: retention neither counts nor deletes it
    # The disk has refused to sync it. A later sync may succeed although bytes are lost, because a system forgets what
    # it could not write; therefore nothing that it replaces is deleted.
    is_unsynced: bool = False
    is_durable: bool = False  # this process has synced it
    pinned: bool = False
    damaged: str | None = None  # why it was set aside as damaged
    is_fast: bool = False  # it is on the fast tier

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key by save order; later saves are greater."""
        return (self.sequence, self.step, self.generation)

    @property
    def save(self) -> tuple[int, int]:
        """Identifies the save on both tiers: a copy from one to the other keeps the number."""
        return (self.sequence, self.step)

    @property
    def identity(self) -> tuple[str, datetime]:
        """Identifies the save: a directory name alone may be reused."""
        return (self.name, self.time)

    @property
    def has_time(self) -> bool:
        """Whether its manifest has the time of the save."""
        return self.time != _LONG_AGO

    def synced(self, is_durable: bool) -> Entry:
        """The entry after the disk has synced it or refused to. A refusal is never forgotten."""
        return dataclasses.replace(self, is_durable=is_durable, is_unsynced=self.is_unsynced or not is_durable)

    def info(self) -> CheckpointInfo:
        """The entry as policies see it."""
        return CheckpointInfo(self.step, self.time, self.metrics, self.pinned, self.temporary)


RECORDED_FIELDS = ("created", "run", "sequence", "left_behind", "record", "metrics", "temporary")
"""The fields of a manifest's information that `entry_from_manifest` reads."""


def entry_from_manifest(name: str, step: int, generation: int, info: Mapping[str, Any]) -> Entry:
    """Make an entry from the `info` section of a manifest; `info` is empty if the manifest could not be read."""
    sequence, left, run = info.get("sequence"), info.get("left_behind"), info.get("run")
    return Entry(
        name,
        step,
        generation,
        sequence=sequence if type(sequence) is int else -1,
        time=_time(info.get("created")),
        metrics=metrics_from_json(info.get("metrics")) or None,
        temporary=info.get("temporary") is True,
        run=run if isinstance(run, str) else None,
        left_behind=tuple(each for each in left if isinstance(each, str)) if isinstance(left, list) else (),
        record_number=count_of(info.get("record", info.get("notes"))) or 0,
        has_lineage=bool(info),
    )


def _time(value: object) -> datetime:
    try:
        found = datetime.fromisoformat(str(value))
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        found.astimezone(UTC)  # policies compare in UTC; notes refer to the entry by the original text
    except (ValueError, OverflowError):
        return _LONG_AGO
    return found


class StepVanishedError(Exception):
    """The owner deleted a step after it was listed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that could not be restored."""

    entry: Entry
    problem: str
    is_proven: bool  # its bytes are proven to be wrong; otherwise it could not be read this time


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    entry: Entry
    results: dict[str, Any]
    skipped: list[Skipped]
    bytes: int
    restore_s: float
    is_mended: bool = False  # it had been set aside as damaged, and all of it was verified now
    left_out: frozenset[str] = frozenset()  # the checkpointables that it has and the caller did not request

    def record(self) -> dict[str, Any]:
        """The fields of the history event."""
        return {
            "step": self.entry.step,
            "name": self.entry.name,
            "bytes": self.bytes,
            "restore_s": self.restore_s,
            "bytes_per_s": round(self.bytes / self.restore_s),
            "skipped": [each.entry.name for each in self.skipped] or None,
        }


def step_name(step: int, generation: int = 0) -> str:
    """The directory name of a generation of a step."""
    return f"step-{step:010d}" + (f".g{generation}" if generation else "")


def parse_step_name(name: str) -> tuple[int, int] | None:
    """The step and the generation of a directory name; None: not the name of a step directory."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation = int(match["step"]), int(match["generation"] or 0)
    token = f".{match['token']}" if match["token"] else ""
    return (step, generation) if step_name(step, generation) + token == name else None


def new_step_name(step: int) -> str:
    """A directory name for a step on an object store, which no other attempt has."""
    return f"{step_name(step)}.{secrets.token_hex(8)}"


def check_step(step: object) -> int:
    """Return the step as an int; raise SettingsError if it is not an integer, negative, or too large."""
    return int(_check_step("step", step))


def free_step_name(step: int, names: Iterable[str]) -> str:
    """The directory name of the generation of a step after the highest one in `names`."""
    taken = {parsed[1] for parsed in map(parse_step_name, names) if parsed is not None and parsed[0] == step}
    generation = max(taken, default=-1) + 1
    if generation > MAX_GENERATION:
        raise CheckpointExistsError(
            f"step {step} cannot be saved again: {step_name(step, MAX_GENERATION)} has the highest generation; move it"
        )
    return step_name(step, generation)


@dataclasses.dataclass(frozen=True)
class RollBack:
    """The names of the directories that a roll-back left behind, and the sequence number of the save after it."""

    sequence: int = -1
    names: frozenset[str] = frozenset()


def last_sequence(entries: Sequence[Entry], recorded: RollBack) -> int:
    """The highest sequence number of the run. If a manifest is unreliable, a number above any that it can have."""
    known = max([recorded.sequence, *(entry.sequence for entry in entries)])
    return known if all(entry.is_certain for entry in entries) else known + UNKNOWN_SAVES


def owning_run(entries: Sequence[Entry]) -> str | None:
    """The id of the run that owns the directory: that of most steps; among equals, that of the latest save."""
    count = collections.Counter(entry.run for entry in entries if entry.run is not None)
    last = {entry.run: entry.order for entry in sorted(entries, key=lambda entry: entry.order)}
    return max(count, key=lambda run: (count[run], last[run], run), default=None)


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """The entries in the order in which the run saved them.

    A step with a damaged manifest has no sequence number, and a step copied from another run has a number of that run.
    Both are placed by their step number, and the lineage of such a copy is ignored.
    """
    home, placed = owning_run(entries), list[Entry]()
    known = [entry for entry in entries if entry.sequence >= 0 and entry.run in (None, home)]
    names = {entry.name for entry in known}
    for entry in entries:
        if entry.name not in names:
            last = max((other.sequence for other in known if other.step <= entry.step), default=-1)
            placed.append(dataclasses.replace(entry, sequence=last, left_behind=(), has_lineage=False))
    return sorted([*known, *placed], key=lambda entry: entry.order)


def left_behind(entries: Sequence[Entry], recorded: RollBack | None = None) -> frozenset[str]:
    """The names of the steps that are not on the branch of the last save, according to that save.

    The last save itself is never among them: its name may be the reused name of a step that was left behind and
    deleted. The roll-back of the run record applies if no reliable manifest is from a later save.
    """
    telling = [entry for entry in entries if entry.has_lineage]
    last = next((entry for entry in reversed(telling) if entry.is_certain), None)
    found = RollBack() if last is None else RollBack(last.sequence, frozenset(last.left_behind) - {last.name})
    if recorded is not None and recorded.sequence > found.sequence:
        found = recorded
    elif recorded is not None and recorded.sequence == found.sequence:
        # Copies of what was left behind on the fast tier may have ended after this save, so only the record has them.
        found = RollBack(found.sequence, found.names | recorded.names)
    if telling and telling[-1].sequence > found.sequence:  # an unreliable manifest is the only source
        found = RollBack(names=frozenset(telling[-1].left_behind) - {telling[-1].name})
    names = frozenset(entry.name for entry in entries) & found.names
    return names | _passed_by([entry for entry in entries if entry.name not in names])


def _passed_by(line: Sequence[Entry]) -> frozenset[str]:
    """The names of steps of the fast tier at or above the number of a later save: the job that made it lacked them.

    Their hosts were not part of that job, so its manifests do not name them.
    """
    saves = [entry for entry in line if entry.has_lineage and entry.is_certain and entry.damaged is None]
    return frozenset(
        entry.name
        for entry in line
        if entry.is_fast and any(each.sequence > entry.sequence and each.step <= entry.step for each in saves)
    )


def left_behind_by(restored: Entry, entries: Sequence[Entry], recorded: RollBack) -> frozenset[str]:
    """The names of the steps that are left behind once the run continues from `restored`."""
    before = [entry for entry in entries if entry.order <= restored.order]
    later = {entry.name for entry in entries if entry.order > restored.order}
    known = recorded if recorded.sequence <= restored.sequence else None
    return left_behind(before, known) - {restored.name} | later


def branch_last(entries: Sequence[Entry], left: Collection[str]) -> list[Entry]:
    """Sort the entries: first those left behind, then the current branch; each in order."""
    return sorted(entries, key=lambda entry: (entry.name not in left, entry.order))


def newest_generations(entries: Sequence[Entry]) -> list[Entry]:
    """The last entry of each step, in the given order."""
    last: dict[int, Entry] = {}
    for entry in entries:
        last.pop(entry.step, None)
        last[entry.step] = entry
    return list(last.values())


def names_after(step: int, line: Sequence[Entry]) -> set[str]:
    """The names of the branch's steps above `step`, or saved after it: saving `step` again leaves them behind."""
    same = [entry.order for entry in line if entry.step == step]
    return {entry.name for entry in line if entry.step > step or (same and entry.order > max(same))}


def check_new_step(directory: str, step: int, line: Sequence[Entry], restored: Entry | None) -> None:
    """Refuse a step that the run has already, or that is below a later one.

    `line` is the current branch, and `restored` the step that this process restored, if it has saved none since.
    Earlier saves may have higher numbers, for example after a renaming: they are left behind.
    """
    steps = {entry.step for entry in line}
    if step in steps:
        raise CheckpointExistsError(f"{directory}: step {step} is committed already; pass overwrite=True to replace it")
    latest = max(steps, default=step) if restored is None else restored.step
    if latest > step:
        raise SettingsError(
            f"{directory}: expected a step above {latest}, which the run already has, found {step}: call restore() "
            "first to continue from there, leave later steps behind by restore(step=...) or overwrite=True, or choose "
            "another directory"
        )


class ResumePoint:
    """The step that this process resumed from (None: no step, or it has saved since), and the steps at that time.

    It keeps a save from silently leaving behind steps that another process has saved in the meantime.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None
        # The time of the save of each step by its name (None: unreadable). None: this process has not scanned the run.
        self._seen: dict[str, datetime | None] | None = None
        self._fast = set[tuple[int, int, datetime]]()  # the steps of the fast tier at that time, as saves

    def restored(self, entry: Entry, there: Sequence[Entry]) -> None:
        """Record that `entry` was restored, chosen from the entries in `there`."""
        self.entry = entry
        self._seen = {each.name: each.time if each.is_certain else None for each in [entry, *there]}
        self._fast = {(*each.save, each.time) for each in [entry, *there] if each.is_fast}

    def nothing(self, lost: Sequence[Entry]) -> None:
        """Record that training starts from scratch: the run has no step but those of which too much is `lost`."""
        if self.entry is None:
            self._seen, self._fast = {}, {(*each.save, each.time) for each in lost}

    def saved(self) -> None:
        """Record a save of this process: it continues from its own step now."""
        self.entry = self._seen = None

    def left_behind(self, there: Sequence[Entry], before: frozenset[str], recorded: RollBack) -> frozenset[str]:
        """The names of the steps left behind from here; `before` if nothing was restored or others have saved."""
        return before if self.entry is None or self._unseen(there) else left_behind_by(self.entry, there, recorded)

    def refuse(self, directory: str, there: Sequence[Entry]) -> None:
        """Raise CheckpointExistsError if another process has saved since the restore."""
        if unseen := self._unseen(there):
            since = "found no step" if self.entry is None else f"restored step {self.entry.step}"
            raise CheckpointExistsError(
                f"{directory}: since this process {since}, another process has saved {', '.join(map(str, unseen))}: "
                "restore again to continue from there, use restore(step=...) to leave those steps behind, or choose "
                "another directory"
            )

    def _unseen(self, there: Sequence[Entry]) -> list[int]:
        """The steps that others have saved since. Names are reused, so the times are compared where both are known."""
        seen = self._seen
        if seen is None:
            return []

        def is_known(entry: Entry) -> bool:
            if (*entry.save, entry.time) in self._fast:  # or a copy of one of these
                return True
            return entry.name in seen and (not entry.is_certain or seen[entry.name] in (None, entry.time))

        return sorted({entry.step for entry in there if not is_known(entry)})
