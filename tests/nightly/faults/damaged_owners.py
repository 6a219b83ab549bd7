"""Damage any file of a run whose owner has died, including record, history and lock, and let the next owner continue.

The run has a pinned step, one with the best metric, a branch abandoned by a roll-back, and a step that was set aside.
Whatever the damage, the next owner restores the newest whole step, byte for byte, and its retention deletes nothing
that a pin or the policy keeps; if the record is lost, it deletes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import re
import traceback

import pytest

from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import AnyPreservationPolicy, BestN, LatestN
from jaxckpt_train.run import lock
from jaxckpt_train.run.history import HISTORY_NAME
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.run.record import RECORD_NAME
from jaxckpt_train.settings import DigestName
from tests.nightly.crash.programs import process
from tests.nightly.faults.damage_report import CLEAN, markdown
from tests.nightly.faults.damages import KINDS, Files, Victim, chosen
from tests.nightly.faults.sample_runs import (
    DIGESTS,
    RUN,
    expected,
    files_below,
    planted,
    raw,
    same_ids,
    saving,
    state_of,
)
from tests.support.memory_backend import MemoryBackend

HISTORY, LOCK = f"{RUN}/{HISTORY_NAME}", f"{RUN}/{LOCK_NAME}/0000000001.json"
PINNED, BEST, LEFT, OLD, ASIDE, AGAIN, NEWEST = (
    *(f"step-{step:010d}" for step in (1, 2, 3, 4, 5)),
    "step-0000000005.g1",
    "step-0000000006",
)
LINE = (NEWEST, AGAIN, OLD, BEST, PINNED)  # the order in which a restore tries them
SURE = {PINNED, BEST, LEFT, ASIDE}  # these stay in any case
RECORD_KINDS = tuple(KINDS)
LOCK_KINDS = tuple(KINDS)
POLICY = AnyPreservationPolicy((LatestN(2), BestN("loss", 1, "min", keep_checkpoints_without_metrics=False)))


@dataclasses.dataclass
class Found:
    """The result of a campaign: trials by file, kind of damage and outcome, and problems."""

    trials: collections.Counter[tuple[str, str, str]] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def run_of(digest: DigestName) -> tuple[Files, Files]:
    """Return the files left by the dead owner, and older versions of them or those of another step."""
    backend = MemoryBackend()
    with process(1), same_ids():
        manager = saving(digest, backend)
        _save(manager, 1, 2, 3)
        manager.pin(1)
        before = files_below(backend, RUN)
        manager.attach_metrics(2, {"loss": 0.5})
        manager.restore(step=2)
        _save(manager, 4, 5)
        segment = backend._file(f"{RUN}/{ASIDE}/state/p00000-s000.safetensors", "damage")
        segment.data[-1] ^= 1
        manager.restore()
        assert manager.restored_step == 4
        _save(manager, 5, 6)
        left = files_below(backend, RUN)
        manager.close()
    older = {path: left[re.sub(r"step-\d+(\.g1)?", PINNED if BEST in path else BEST, path)] for path in left}
    another = {LOCK: left[LOCK].replace(b'"pid":1', b'"pid":7')}
    return left, older | {record_in(left): before[record_in(before)], HISTORY: before[HISTORY]} | another


def record_in(files: Files) -> str:
    """The path of the newest version of the record."""
    return max(path for path in files if path.startswith(f"{RUN}/{RECORD_NAME}/"))


def _save(manager: StepManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state_of(step), metrics={"loss": 1.0 + step})
        manager.wait()


def campaign(trials: int, seed: int, record: tuple[str, ...] = RECORD_KINDS) -> Found:
    """Run `trials` with a damaged file, a tenth of them with two, and a tenth as many clean runs."""
    found = Found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "SILENCE_S", 0.0)  # an owner that cannot be checked has been silent for long
        for number in range(trials):
            digest, chance = DIGESTS[number % len(DIGESTS)], random.Random(f"{seed} {number}")
            left, older = run_of(digest)
            files = dict(left)
            done = [_damage(files, left, older, record, chance) for _ in range(1 + (chance.random() < 0.1))]
            subject = f"{' and '.join(f'{kind} {sort}' for sort, kind in done)}, {digest}, trial {number}"
            found.trials[*done[0], _Owner(found, subject, left, files).goes_on()] += 1
            if number % 10 == 0:
                found.trials[CLEAN, CLEAN, _Owner(found, f"clean {digest}", left, dict(left)).goes_on()] += 1
    return found


def _damage(files: Files, left: Files, older: Files, record: tuple[str, ...], chance: random.Random) -> tuple[str, str]:
    """Damage an undamaged file, and return its sort and the kind of damage."""
    kinds = {"record": record, "lock": LOCK_KINDS}
    sorts: dict[str, list[str]] = {}
    for path, data in left.items():
        if files.get(path) == data:
            sorts.setdefault(_sort_of(path), []).append(path)
    sort = chance.choice(list(sorts))
    kind = chance.choice(kinds.get(sort, tuple(KINDS)))
    name = chosen(files, sorts[sort], chance.random() < 0.5, chance)
    names = [path for each, paths in sorts.items() for path in paths if kind in kinds.get(each, KINDS)]
    KINDS[kind](files, Victim(name, names, older, chance))
    return sort, kind


def _sort_of(path: str) -> str:
    if path.startswith(f"{RUN}/{RECORD_NAME}/"):
        return "record"
    other_files = {HISTORY: "history", LOCK: "lock"}
    return other_files.get(path, "newest step" if f"/{NEWEST}/" in path else "older steps")


@dataclasses.dataclass
class _Owner:
    """The next owner of a damaged run, and the checks of its promises."""

    found: Found
    subject: str
    left: Files
    files: Files

    def __post_init__(self) -> None:
        self.changed = {path for path, data in self.left.items() if self.files.get(path) != data}
        self.lost_record = record_in(self.left) in self.changed

    def _wrong(self, what: str) -> None:
        self.found.problems.append(f"{self.subject}: {what}")

    def _is_whole(self, name: str) -> bool:
        return not any(f"/{name}/" in path for path in self.changed)

    def goes_on(self) -> str:
        """Own, restore, save and delete; return the outcome."""
        backend = planted(self.files)
        try:
            with process(2):
                restored = self._life(backend)
        except CheckpointError as error:
            self._wrong(f"the run does not go on: {error}")
            return "does not go on"
        except Exception as error:  # noqa: BLE001  # any error that is no CheckpointError
            trace = traceback.extract_tb(error.__traceback__)[-1]
            self._wrong(f"raised {error!r} at {trace.filename}:{trace.lineno}")
            return "raised"
        self._check_kept(files_below(backend, RUN), restored)
        return f"went on from {'the newest' if restored == NEWEST else 'an older step'}"

    def _life(self, backend: MemoryBackend) -> str:
        """Run one owner, and return the name of the step that it restored."""
        with StepManager(RUN, backend=backend, preservation_policy=POLICY) as manager:
            manager.own()
            found, step = raw(manager.restore()), manager.restored_step
            name = {6: NEWEST, 5: AGAIN, 4: OLD, 2: BEST, 1: PINNED}.get(step or 0, LEFT)
            self._check_restored(manager, name, is_right=name in LINE and found == expected(step or 0))
            manager.save(7, state_of(7), metrics={"loss": 8.0})
            manager.wait()
        with StepManager(RUN, backend=backend) as reader:
            if raw(reader.restore()) != expected(7):
                self._wrong("what was saved then is not the newest")
        return name

    def _check_restored(self, manager: StepManager, name: str, *, is_right: bool) -> None:
        if not is_right:
            self._wrong(f"restored other data, or an abandoned step: {name}")
            return
        later = LINE[: LINE.index(name)]
        if any(self._is_whole(each) for each in later):
            self._wrong(f"restored {name}, and a newer one is whole")
        known = {entry.name for entry in manager._run._entries if entry.damaged is not None or entry.is_held}
        if not {each for each in later if f"{RUN}/{each}/COMMIT" in self.files} <= known:
            self._wrong(f"restored {name}, and neither set aside nor held what came later, but {sorted(known)}")
        if not self.lost_record and HISTORY not in self.changed and self._is_whole(ASIDE):
            if ASIDE in manager.history.events()[-1].get("skipped", []):
                self._wrong("what was set aside was tried again")

    def _check_kept(self, now: Files, restored: str) -> None:
        """Check that all pinned, kept, damaged and possibly needed steps are unchanged."""
        stays = SURE | set(LINE[: LINE.index(restored) + 1]) if restored in LINE else SURE
        for path, data in self.files.items():
            name = path.split("/")[2]
            if name.startswith("step-") and (name in stays or self.lost_record) and now.get(path) != data:
                why = "the record is lost, and" if self.lost_record else "what must stay is gone:"
                self._wrong(f"{why} {name} was deleted or changed")
                return
        if not self.changed and any(f"/{name}/" in path for name in (OLD, AGAIN) for path in now):
            self._wrong("retention did not delete what no policy keeps")


def table(found: Found) -> str:
    """Return a table of outcomes by damaged file and kind."""
    sorts = [CLEAN, *sorted({sort for sort, _, _ in found.trials} - {CLEAN})]
    outcomes = sorted({outcome for _, _, outcome in found.trials})
    rows = []
    for sort in sorts:
        trials = dict.fromkeys(KINDS, 0)
        ends = collections.Counter[str]()
        for (each, kind, outcome), count in found.trials.items():
            if each == sort:
                trials[kind] = trials.get(kind, 0) + count
                ends[outcome] += count
        rows.append([sort, *(f"{trials[kind] or '':}" for kind in KINDS), *(f"{ends[end] or '':}" for end in outcomes)])
    return markdown(["damaged", *KINDS, *outcomes], rows)
