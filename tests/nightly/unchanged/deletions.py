"""Random saves, and deletions of any steps in any order: `python -m tests.nightly.unchanged.deletions`.

Steps are deleted by a policy that chooses at random, by `jaxckpt prune`, by `jaxckpt mv`, and by hand, also the newest
one and while the run continues. After each operation all other steps have the same files as before; at the end they,
and the moved ones, are verified and loaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from tests.nightly.unchanged.sequences import SETTINGS, Sequence, main
from tests.support.commands import printed


class AtRandom:
    """A policy that keeps the newest step, and others at random. It is asked by another thread.

    Attributes:
        going: the steps that it has not kept.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance, self.going = chance, set[int]()

    def should_preserve(self, checkpoints: Many[jct.CheckpointInfo], *, context: jct.DecisionContext) -> list[bool]:
        """Decide."""
        newest = max(info.step for info in checkpoints)
        flags = [
            info.step == newest or (info.step not in self.going and self._chance.random() < 0.9) for info in checkpoints
        ]
        self.going.update(info.step for info, keeps in zip(checkpoints, flags, strict=True) if not keeps)
        return flags


class Deletions(Sequence):
    """One run, and what each step that nobody has deleted must have."""

    operations = ("change", "save", "save", "save", "save", "resume", "remove", "remove", "prune", "move")

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.policy, self.moved = AtRandom(random.Random(chance.random())), folder / "moved"
        self.files: dict[Path, bytes] = {}
        self.has_newest = True  # so that the next save finds what it takes over
        super().__init__(folder / "run", chance)

    def opened(self) -> jct.StepManager:
        return jct.StepManager(self.folder, frozen=self.frozen, settings=SETTINGS, preservation_policy=self.policy)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def staying(self) -> list[int]:
        """The steps that must be there, lowest first."""
        return sorted(self.saved.keys() - self.policy.going)

    def there(self) -> list[int]:
        """The steps on the disk: also those that the policy does not keep, but whose deletion had to wait."""
        return sorted(int(path.name[-10:]) for path in self.folder.glob("step-*"))

    def save(self) -> None:
        """Save; that may fail where the file to take over was removed by hand, and its array donated meanwhile."""
        try:
            super().save()
        except StorageError as error:
            if self.has_newest or error.errno != errno.ENOENT:
                raise
            del self.saved[self.step]
            assert not self.place(self.step).exists(), "a save that failed is there"
            return
        self.has_newest = True
        self.files |= files_below(self.place(self.step))
        self.compare()

    def resume(self) -> None:
        """Start again, from the newest step that is left."""
        self.manager.close()
        self.manager, self.has_newest = self.opened(), True
        if self.manager.steps:
            found = self.manager.restore({"state": dict(self.state)})["state"]
            newest = self.manager.latest
            assert newest >= max(self.staying(), default=0), f"restored {newest}"
            self.state = dict(found)
            assert self.bytes_of(self.state) == self.saved[newest], "restored other values"
        self.compare()

    @staticmethod
    def bytes_of(state: dict[str, object]) -> dict[str, bytes]:
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.items()}

    def remove(self) -> None:
        """Remove one step by hand."""
        if staying := self.staying():
            step = self.chance.choice(staying)
            self.has_newest = self.has_newest and step != staying[-1]
            shutil.rmtree(self.place(step), ignore_errors=True)  # the policy may let it go now
            del self.saved[step]
            self.compare()

    def prune(self) -> None:
        self.manager.close()  # which may delete
        if there := self.there():
            count = self.chance.randint(1, len(there))
            printed("prune", self.folder, "--keep-latest", count, "--yes")
            self.policy.going.update(there[:-count])
        self.resume()

    def move(self) -> None:
        """Move one step into another directory."""
        self.manager.close()
        if len(staying := self.staying()) > 1:
            step = self.chance.choice(staying[:-1])
            printed("mv", self.folder, f"{self.moved}/", "--step", step)
            self.policy.going.add(step)
        self.resume()

    def compare(self) -> None:
        """Compare the files of all steps that must be there with what they were."""
        for step in self.staying():
            path = self.place(step)
            before = {file: data for file, data in self.files.items() if file.is_relative_to(path)}
            is_same = files_below(path) == before
            assert is_same or step in self.policy.going, f"step {step} has other files than before"

    def check(self) -> None:
        """Verify and load every step, once all deletions have ended."""
        self.manager.close()
        self.compare()
        for path in [*self.folder.glob("step-*"), *self.moved.glob("step-*")]:
            step = int(path.name[-10:])
            assert jct.verify(path).ok, f"step {step} is damaged"
            assert self.bytes_of(jct.load(path)) == self.saved[step], f"step {step} has other values"
        # Without the newest step, which was removed by hand, those that it replaces may have to stay.
        assert self.there() == self.staying() or not self.has_newest, "not all are deleted"


def files_below(folder: Path) -> dict[Path, bytes]:
    """The contents of all files, without those that are deleted meanwhile."""
    found = dict[Path, bytes]()
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.read_bytes()
    return found


if __name__ == "__main__":
    main(__doc__, Deletions, 5000)
