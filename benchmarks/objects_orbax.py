"""What a process of Orbax does in the benchmark of object stores: it saves to `gs://` and loads from there."""

from __future__ import annotations

import jax
import numpy as np
from etils import epath

from benchmarks import subjects_orbax
from benchmarks.objects_arrays import ARRAYS, array_bytes, array_name, check, timed
from benchmarks.objects_turns import jax_state, jax_target

FIRST = "-first"
"""The end of the name of a small checkpoint, saved and loaded before the clock starts."""


def save_by_orbax(bucket: str, mib: int, is_quick: bool, variant: str) -> dict[str, float]:
    """A save, until it is finished."""
    subject, folder = getattr(subjects_orbax, variant)(), epath.Path(bucket) / variant

    def save(name: epath.Path, state: dict[str, jax.Array]) -> None:
        subject.start_save(name, state)()

    save(folder.with_name(variant + FIRST), jax_state(1))
    state = jax.block_until_ready(jax_state(mib))
    seconds = timed(lambda: save(folder, state), mib, is_quick)
    subject.close()
    return {"seconds": seconds}


def load_by_orbax(bucket: str, mib: int, is_quick: bool, variant: str) -> dict[str, float]:
    """The same, loaded into JAX arrays until all are ready; then it is removed."""
    subject, folder = getattr(subjects_orbax, variant)(), epath.Path(bucket) / variant
    first = folder.with_name(variant + FIRST)
    found: dict[str, jax.Array] = {}

    def load(name: epath.Path, mib: int) -> None:
        found.update(jax.block_until_ready(subject.load(name, jax_target(mib))))

    load(first, 1)
    seconds = timed(lambda: load(folder, mib), mib, is_quick)
    subject.close()
    for number in range(ARRAYS):
        check(np.asarray(found[array_name(number)]).tobytes(), array_bytes(number, mib).tobytes())
    for each in (first, folder):
        each.rmtree()
    return {"seconds": seconds}
