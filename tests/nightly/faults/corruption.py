"""Damage checkpoints at random, and check that wrong data is never loaded.

`python -m tests.nightly.faults.corruption`

A run of two steps is in memory. The files of the newer step are damaged in eight ways; then it is loaded, verified and
restored. A load returns the saved data or raises a `CheckpointError`; a verification finds every changed byte; a
restore falls back to the older step and sets the damaged one aside: it is not tried again, and retention does not
delete it. Clean runs must not raise alarms. `damaged_owners` damages all files of a run, and `damaged_background`
checks that damage is found while the run continues.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import time

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.settings import DigestName, StoreSettings
from jaxckpt_train.store.verify import verify
from tests.nightly.crash.explorer import small_sizes
from tests.nightly.faults import damaged_background, damaged_owners
from tests.nightly.faults.campaign_end import leave_with
from tests.nightly.faults.damage_report import CLEAN, UNCHANGED, UNNOTICED, Found, Trial, tables
from tests.nightly.faults.damages import KINDS, Files, Victim, chosen
from tests.nightly.faults.layers import layer_of
from tests.nightly.faults.sample_runs import DIGESTS, NEW, OLD, RUN, expected, files_below, made, planted, raw, state_of
from tests.support.memory_backend import MemoryBackend

GOES_ON = 10  # in one of this many trials another owner saves and deletes
OTHERS = 20  # one trial of all files of a run, and one in the background, for this many trials
STEP = f"{RUN}/{NEW}"


def campaign(
    trials: int, seed: int, digests: tuple[DigestName, ...] = DIGESTS, settings: StoreSettings | None = None
) -> Found:
    """Run `trials` with damage, and a tenth as many without."""
    found = Found()
    pristine = {digest: made(digest) for digest in digests}
    for number in range(trials):
        digest, chance = digests[number % len(digests)], random.Random(f"{seed} {number}")
        kind, by = chance.choice(list(KINDS)), chance.choice(("byte", "file"))
        files = dict(pristine[digest])
        names = [name for name in files if f"/{NEW}/" in name]
        name = chosen(files, names, by == "byte", chance)
        older = {path: files[path.replace(NEW, OLD)] for path in names}
        KINDS[kind](files, Victim(name, names, older, chance))
        subject = f"{kind} {name}, {digest}, trial {number}"
        _One(found, kind, by, digest, subject, files, files != pristine[digest], settings).try_it(number % GOES_ON == 0)
        if number % 10 == 0:
            clean = dict(pristine[digest])
            _One(found, CLEAN, by, digest, f"clean {digest}", clean, False, settings).try_it(
                number % (10 * GOES_ON) == 0
            )
    return found


@dataclasses.dataclass
class _One:
    """One trial with a damaged or a clean run."""

    found: Found
    kind: str
    by: str
    digest: DigestName
    subject: str
    files: Files
    is_changed: bool
    settings: StoreSettings | None

    def try_it(self, goes_on: bool) -> None:
        """Load, verify and restore it; if it `goes_on`, the next owner also restores it, saves, and deletes."""
        backend = planted(self.files)
        problem = self._loaded(backend)
        self._count(problem, _verified(backend))
        before, step = files_below(backend, STEP), 2 if problem is None else 1
        aside = [2] if step == 1 and f"{STEP}/COMMIT" in before else []  # without COMMIT it is no step
        self._restore(backend, step, aside)
        if goes_on:
            self._go_on(backend, step, aside)
        is_kept = step == 1 or not goes_on  # otherwise it is a normal step, which the policy does not keep
        if files_below(backend, STEP) != (before if is_kept else {}):
            self._wrong("a damaged step was changed or deleted" if is_kept else "retention left an old step")

    def _wrong(self, what: str) -> None:
        self.found.problems.append(f"{self.subject}: {what}")

    def _loaded(self, backend: MemoryBackend) -> str | None:
        """Return the error of a load, or None if it returned the saved data."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "backend_for", lambda _: backend)
            try:
                loaded = raw(checkpoint.load_checkpointables(STEP, settings=self.settings))
            except CheckpointError as error:
                if not self.is_changed:
                    self._wrong(f"a false alarm: {error}")
                return str(error)
        if loaded != expected(2):
            self._wrong("loaded in silence, and wrong")
        return None

    def _count(self, loaded: str | None, verified: str | None) -> None:
        """Count the trial by what noticed the damage: a load, or only a verification."""
        if (verified is not None) != self.is_changed:
            self._wrong("verify finds nothing" if self.is_changed else f"a false alarm of verify: {verified}")
        error = verified if loaded is None else loaded
        noticed = None if error is None else "verify" if loaded is None else "load"
        layer = layer_of(error, STEP) if error is not None else UNNOTICED if self.is_changed else UNCHANGED
        if layer is None:
            self._wrong(f"noticed by no check that is known: {error}")
        self.found.trials[Trial(self.kind, self.by, self.digest, noticed, layer or "unknown")] += 1

    def _restore(self, backend: MemoryBackend, step: int, aside: list[int]) -> None:
        """Let the first owner restore it."""
        with StepManager(RUN, backend=backend, settings=self.settings) as manager:
            self._restored(manager, step)
            if (manager.steps, manager.damaged) != ([1, 2][:step], aside):
                self._wrong(f"not set aside: after the restore there are {manager.steps}, damaged {manager.damaged}")

    def _go_on(self, backend: MemoryBackend, step: int, aside: list[int]) -> None:
        """Check that the next owner does not retry the damaged step, and deletes steps that its policy expires."""
        with StepManager(RUN, backend=backend, settings=self.settings, preservation_policy=LatestN(1)) as manager:
            self._restored(manager, step)
            restores = [event for event in manager.history.events() if event["event"] == "restore"]
            if "skipped" in restores[-1]:
                self._wrong("a step that was set aside was tried again")
            manager.save(3, state_of(3))
            manager.wait()
        with StepManager(RUN, backend=backend) as reader:
            if (reader.steps, reader.damaged) != ([3], aside):
                self._wrong(f"not set aside: the next process finds {reader.steps}, damaged {reader.damaged}")

    def _restored(self, manager: StepManager, step: int) -> None:
        manager.own()
        try:
            if raw(manager.restore()) != expected(step):
                self._wrong(f"the restore did not give step {step}")
        except CheckpointError as refused:
            self._wrong(f"the restore raised {refused}")


def _verified(backend: MemoryBackend) -> str | None:
    """Return the first problem of a verification, or None."""
    try:
        return next(iter(verify(backend, STEP, StoreSettings(io_threads=1)).problems), None)
    except CheckpointError as error:
        return str(error)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    with small_sizes():
        found = campaign(arguments.trials, arguments.seed)
        fewer = -(-arguments.trials // OTHERS)
        owners = damaged_owners.campaign(fewer, arguments.seed)
        background = damaged_background.campaign(fewer, arguments.seed)
    print(tables(found) + "\n\n" + damaged_owners.table(owners) + "\n")
    print(f"{background.trials} damaged runs verified in the background: {background.aside} steps set aside")
    problems = found.problems + owners.problems + background.problems
    for kind, count in collections.Counter(problem.partition(" ")[0] for problem in problems).items():
        print(f"  {kind}: {count}")
    leave_with(problems, started, arguments.seed)


if __name__ == "__main__":
    main()
