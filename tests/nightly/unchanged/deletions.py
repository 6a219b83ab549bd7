"""Random saves, and deletions of any steps in any order: `python -m tests.nightly.unchanged.deletions`.

Steps are deleted by a policy that chooses at random, by `jaxckpt prune`, by `jaxckpt mv`, and by hand, also the newest
one and while the run continues. After each operation all other steps have the same files as before; at the end they,
and the moved ones, are verified and loaded.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

import jaxckpt_train as jct
from tests.nightly.unchanged.sequences import SETTINGS, Sequence, main
from tests.support.commands import printed


class AtRandom:
    """A policy that keeps the newest step, and others at random.

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
        self.policy, self.moved = AtRandom(chance), folder / "moved"
        self.files: dict[Path, bytes] = {}
        super().__init__(folder / "run", chance)

    def opened(self) -> jct.StepManager:
        return jct.StepManager(self.folder, frozen=self.frozen, settings=SETTINGS, preservation_policy=self.policy)

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def staying(self) -> list[int]:
        """The steps that must be there, lowest first."""
        return sorted(self.saved.keys() - self.policy.going)

    def save(self) -> None:
        super().save()
        self.files |= files_below(self.place(self.step))
        self.compare()

    def resume(self) -> None:
        """Start again, from the newest step that is left."""
        self.manager.close()
        self.manager = self.opened()
        if self.manager.steps:
            found = self.manager.restore({"state": dict(self.state)})["state"]
            assert self.manager.latest == self.staying()[-1], f"restored {self.manager.latest}"
            self.state = dict(found)
            assert self.bytes_of(self.state) == self.saved[self.staying()[-1]], "restored other values"
        self.compare()

    @staticmethod
    def bytes_of(state: dict[str, object]) -> dict[str, bytes]:
        return {name: np.asarray(leaf).tobytes() for name, leaf in state.items()}

    def remove(self) -> None:
        """Remove one step by hand."""
        if staying := self.staying():
            step = self.chance.choice(staying)
            shutil.rmtree(self.place(step))
            del self.saved[step]
            self.compare()

    def prune(self) -> None:
        if staying := self.staying():
            self.manager.close()
            count = self.chance.randint(1, len(staying))
            printed("prune", self.folder, "--keep-latest", count, "--yes")
            self.policy.going.update(staying[:-count])
            self.resume()

    def move(self) -> None:
        """Move one step into another directory."""
        if len(staying := self.staying()) > 1:
            self.manager.close()
            step = self.chance.choice(staying[:-1])
            printed("mv", self.folder, f"{self.moved}/", "--step", step)
            self.policy.going.add(step)
            self.resume()

    def compare(self) -> None:
        """Compare the files of all steps that must be there with what they were."""
        for step in self.staying():
            assert files_below(self.place(step)) == {
                path: data for path, data in self.files.items() if path.is_relative_to(self.place(step))
            }, f"step {step} has other files than before"

    def check(self) -> None:
        """Verify and load every step, once all deletions have ended."""
        self.manager.close()
        self.compare()
        there = sorted([*self.folder.glob("step-*"), *self.moved.glob("step-*")])
        for path in there:
            step = int(path.name[-10:])
            assert jct.verify(path).ok, f"step {step} is damaged"
            assert self.bytes_of(jct.load(path)) == self.saved[step], f"step {step} has other values"
        assert {int(path.name[-10:]) for path in self.folder.glob("step-*")} == {*self.staying()}, "not all are deleted"


def files_below(folder: Path) -> dict[Path, bytes]:
    """The contents of all files."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main(__doc__, Deletions, 5000)
