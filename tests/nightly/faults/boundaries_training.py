"""A small training for `boundaries`: saves every step with this package, with a flawed one, or by hand.

`python -m tests.nightly.faults.boundaries_training OUT ours|by_hand|FLAW`. It prints the step that it
resumes after, and writes its result to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.nightly.faults.flaws import FLAWS

STEPS = 5
SIZE = 40_000


@jax.jit
def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One update that depends on the count, so that an omitted or repeated update changes the result."""
    key = jax.random.fold_in(jax.random.key(0), state["count"])
    return {"w": 0.9 * state["w"] + jax.random.normal(key, (SIZE,)), "count": state["count"] + 1}


def new_state() -> dict[str, jax.Array]:
    """Return the state before the first step."""
    return {"w": jnp.zeros(SIZE), "count": jnp.zeros((), jnp.int32)}


def train_with_ours(out: Path) -> dict[str, jax.Array]:
    """Train with this package, and keep all steps."""
    with jct.CheckpointCallback(out / "run", save_interval_steps=1, keep_latest=None) as ckpt:
        state = ckpt.resume(new_state())
        print(f"begins after step {ckpt.completed_steps}", flush=True)
        for step in range(ckpt.completed_steps + 1, STEPS + 1):
            state = update(state)
            ckpt(state, step=step)
    return state


def train_by_hand(out: Path) -> dict[str, jax.Array]:
    """Train with one file that is overwritten, so that a kill during a save loses it."""
    file, state = out / "state.npy", new_state()
    if file.exists():
        with file.open("rb") as opened:
            state = {"w": jnp.asarray(np.load(opened)), "count": jnp.asarray(np.load(opened))}
    print(f"begins after step {int(state['count'])}", flush=True)
    while int(state["count"]) < STEPS:
        state = update(state)
        with open(file, "wb") as opened:  # plain calls, which are audited
            np.save(opened, np.asarray(state["w"]))
            np.save(opened, np.asarray(state["count"]))
    return state


def main(out: str, how: str) -> None:
    """Train, and write the result."""
    Path(out).mkdir(exist_ok=True)
    if how in FLAWS:
        FLAWS[how](pytest.MonkeyPatch())
    state = (train_by_hand if how == "by_hand" else train_with_ours)(Path(out))
    (Path(out) / "result").write_bytes(np.asarray(state["w"]).tobytes() + np.asarray(state["count"]).tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
