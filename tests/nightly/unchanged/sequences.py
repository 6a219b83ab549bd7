"""Random changes, saves, resumes and deletions, against a model: `python -m tests.nightly.unchanged.sequences`.

Leaves are JAX arrays and NumPy arrays. They are replaced by others or by equal ones, donated, deleted so that their
address and identity are used again, changed in place, swapped, or left alone. Each step must have the bytes of its
moment, alone and after any other step was deleted.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree import identity
from jaxckpt_train.store import reuse
from tests.nightly.faults.campaign_end import leave_with

NAMES, ELEMENTS, OPERATIONS = 6, 300, 14
SETTINGS = jct.StoreSettings(durability="none", io_threads=1, staging_bytes=1 << 20)


@functools.partial(jax.jit, donate_argnums=0)
def changed(array: jax.Array, by: Any) -> jax.Array:
    return array + by


class Sequence:
    """One run, and what each of its steps must have."""

    operations = ("change", "save", "save", "save", "resume", "delete")

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.state: dict[str, Any] = {f"a{number}": self.made(number % 3 == 2) for number in range(NAMES)}
        self.frozen = [name for name in self.state if chance.random() < 0.4] or None
        self.saved: dict[int, dict[str, bytes]] = {}
        self.done, self.step = Counter[str](), 0
        self.manager = self.opened()

    def opened(self) -> jct.StepManager:
        return jct.StepManager(self.folder, frozen=self.frozen, settings=SETTINGS)

    def made(self, is_numpy: bool) -> Any:
        value = np.full(ELEMENTS, self.chance.randrange(1 << 20), np.float32)
        return value if is_numpy else jnp.array(value)

    def change(self) -> None:
        """Change one leaf in one of the ways, or none."""
        name = self.chance.choice(list(self.state))
        leaf = self.state[name]
        if isinstance(leaf, np.ndarray):
            leaf[self.chance.randrange(ELEMENTS)] += 1
            return
        way = self.chance.choice(("other", "equal", "donated", "deleted", "swapped"))
        if way == "other":
            self.state[name] = self.made(False)
        elif way == "equal":
            self.state[name] = jnp.array(np.array(leaf))
        elif way == "donated":
            self.state[name] = changed(leaf, self.chance.randrange(2))
        elif way == "deleted":
            leaf.delete()
            del leaf, self.state[name]
            self.state[name] = self.made(False)
            self.state = dict(sorted(self.state.items()))
        else:
            other = self.chance.choice([each for each in self.state if not isinstance(self.state[each], np.ndarray)])
            self.state[name], self.state[other] = self.state[other], leaf

    def save(self) -> None:
        self.step += 1
        self.saved[self.step] = {name: np.asarray(leaf).tobytes() for name, leaf in self.state.items()}
        self.manager.save(self.step, {"state": dict(self.state)})
        if self.chance.random() < 0.3:
            self.change()  # while the save is running
        self.manager.wait()

    def resume(self) -> None:
        self.manager.close()
        self.manager = self.opened()
        if self.saved:
            self.state = dict(self.manager.restore({"state": dict(self.state)})["state"])

    def delete(self) -> None:
        if len(self.saved) > 1:
            step = self.chance.choice(sorted(self.saved)[:-1])
            shutil.rmtree(self.manager.path(step))
            del self.saved[step]

    def check(self) -> None:
        """Load every step."""
        for step, expected in self.saved.items():
            found = jct.load(self.manager.path(step))
            assert {name: np.asarray(leaf).tobytes() for name, leaf in found.items()} == expected, f"step {step}"

    def live(self) -> int:
        """Perform random operations; returns how many bytes were taken over."""
        for _ in range(OPERATIONS):
            getattr(self, self.chance.choice(self.operations))()
        self.save()
        self.check()
        self.manager.close()
        return sum(event.get("taken_bytes", 0) for event in self.manager.history.events())


def campaign(
    sequences: int, seed: int, folder: Path | None = None, kind: type[Sequence] = Sequence
) -> tuple[list[str], int]:
    """Run sequences; returns the problems, and how many bytes were taken over."""
    problems, taken = list[str](), 0
    logger = logging.getLogger("jaxckpt_train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse, "MIN_APART_BYTES", 1)
        patch.setattr(logger, "disabled", True)
        on_host = identity.is_host_memory
        for number in range(seed, seed + sequences):
            # Every other one as on an accelerator, where arrays are recognised without a look at them.
            patch.setattr(identity, "has_own_memory", lambda number=number: bool(number % 2))
            patch.setattr(identity, "is_host_memory", (lambda sharding: False) if number % 2 else on_host)
            # After a problem, the owner may still be deleting steps.
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
                try:
                    taken += kind(Path(name), random.Random(number)).live()
                except Exception as error:  # noqa: BLE001  # each is a problem
                    problems.append(f"seed {number}: {type(error).__name__}: {error}")
    return problems, taken


def main(description: str | None = __doc__, kind: type[Sequence] = Sequence, sequences: int = 20_000) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are; faster in memory")
    chosen, started = parser.parse_args(), time.monotonic()
    problems, taken = campaign(chosen.sequences, chosen.seed, chosen.folder, kind)
    print(f"{chosen.sequences} sequences, {taken:,} bytes taken over;", end=" ")
    leave_with(problems, started, chosen.seed)


if __name__ == "__main__":
    main()
