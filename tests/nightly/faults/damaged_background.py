"""Damage a step of a run with background verification: it is set aside, and its neighbours are read next."""

from __future__ import annotations

import dataclasses
import random
import weakref
from typing import Any

from jaxckpt_train.manager import StepManager
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.settings import DigestName
from jaxckpt_train.store.manifest import MANIFEST_NAME
from tests.nightly.faults.damages import KINDS, Files, Victim, chosen
from tests.nightly.faults.sample_runs import DIGESTS, RUN, files_below, made, planted
from tests.support.memory_backend import MemoryBackend

STEPS = 4
FAST = 1 << 60  # bytes per second


class Watched(MemoryBackend):
    """Record the steps whose manifests are opened, in order, without repetitions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        step = directory.rpartition("/")[2]
        if name == MANIFEST_NAME and self.opened[-1:] != [step]:
            self.opened.append(step)
        return super().open(directory, name, direct=direct)


@dataclasses.dataclass
class Found:
    """The result of a campaign: trials, steps set aside, and problems."""

    trials: int = 0
    aside: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def campaign(trials: int, seed: int) -> Found:
    """Run `trials` with damage, and a tenth as many without."""
    found = Found(trials)
    pristine: dict[DigestName, Files] = {digest: made(digest, STEPS) for digest in DIGESTS}
    for number in range(trials):
        digest, chance = DIGESTS[number % len(DIGESTS)], random.Random(f"{seed} {number}")
        files, step = dict(pristine[digest]), f"step-{chance.randint(1, STEPS):010d}"
        kind, names = chance.choice(list(KINDS)), [name for name in files if f"/{step}/" in name]
        name = chosen(files, names, chance.random() < 0.5, chance)
        neighbour = f"step-{int(step[-10:]) % STEPS + 1:010d}"
        older = {path: files[path.replace(step, neighbour)] for path in names}
        KINDS[kind](files, Victim(name, names, older, chance))
        is_found = files != pristine[digest] and f"{RUN}/{step}/COMMIT" in files  # without COMMIT it is no step
        _try(found, f"{kind} {name}, {digest}, background trial {number}", files, step if is_found else None)
        if number % 10 == 0:
            _try(found, f"clean {digest} in the background", dict(pristine[digest]), None)
    return found


def _try(found: Found, subject: str, files: Files, damaged: str | None) -> None:
    backend = Watched()
    planted(files, backend)
    with StepManager(RUN, backend=backend) as manager:
        manager.own()
        run = manager._run
        order = [entry.name for entry in run.entries()]
        scrubber = Scrubber(backend, RUN, FAST, weakref.ref(run))
        backend.opened.clear()
        for _ in range(2 * STEPS):
            scrubber._verify_next()
        aside = [entry.name for entry in run.damaged()]
    wanted = [] if damaged is None else [damaged]
    found.aside += len(aside)
    if aside != wanted:
        found.problems.append(f"{subject}: set aside in the background are {aside}, expected {wanted}")
    if damaged is not None:
        at, first = order.index(damaged), backend.opened.index(damaged)
        next_to = [*order[at + 1 : at + 2], *order[max(at - 1, 0) : at]]
        after = backend.opened[first + 1 :]
        if after[: len(next_to)] != next_to:
            found.problems.append(f"{subject}: its neighbours {next_to} were not next, but {after}")
        if damaged in after:
            found.problems.append(f"{subject}: it was read again after it was set aside")
    if not set(order) <= set(backend.opened):
        found.problems.append(f"{subject}: of {order} only {backend.opened} were verified")
    now = files_below(backend, RUN)
    if any(now.get(path) != data for path, data in files.items() if "/step-" in path):
        found.problems.append(f"{subject}: a step was changed or deleted in the background")
