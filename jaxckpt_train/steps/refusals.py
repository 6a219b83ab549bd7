"""Saves that a run refuses, since they would go beside what is there, or over it, unasked."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxckpt_train.errors import CheckpointExistsError, SettingsError
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.transaction import is_committed


def refuse_checkpoint(backend: Backend, directory: str) -> None:
    """Raise SettingsError if a checkpoint lies where a run is to be: retention of its own run would delete both."""
    if is_committed(backend, directory):
        raise SettingsError(
            f"{directory}: is one checkpoint, and no directory of a run: give that of the run which it is a step of; "
            "to begin a new run with its state, give an empty one, and this as `init_from` (or to `jaxckpt_train.load`)"
        )


def refuse_committed(directory: str, step: int, whole: Sequence[Entry], left: Collection[str]) -> None:
    """Raise CheckpointExistsError if a step is committed already.

    Args:
        directory: of the run.
        step: that is to be saved.
        whole: all generations of all steps that are whole.
        left: the names of what a roll-back has left behind.
    """
    if any(entry.step == step and entry.name not in left for entry in whole):
        raise CheckpointExistsError(
            f"{directory}: step {step} is committed already; pass overwrite=True to publish it anew"
        )


def refuse_to_begin_below(directory: str, step: int, line: Sequence[Entry]) -> None:
    """Raise SettingsError if a process that has restored nothing begins with a step below those that are there."""
    latest = max((entry.step for entry in line), default=step)
    if latest > step:
        raise SettingsError(
            f"{directory}: expected a step above {latest}, which the run has already, found {step}: restore() first, "
            "to go on from there (or restore(step=...), to leave later steps behind), or choose another directory"
        )


def refuse_unseen(directory: str, restored: Entry, entries: Sequence[Entry], last_seen: int) -> None:
    """Raise CheckpointExistsError if others have saved since this process restored: it would leave that behind.

    Args:
        directory: of the run.
        restored: what this process goes on from.
        entries: all that there is now.
        last_seen: the highest sequence number that there was at the restore.
    """
    unseen = sorted({entry.step for entry in entries if entry.sequence > last_seen})
    if unseen:
        steps = ", ".join(map(str, unseen))
        raise CheckpointExistsError(
            f"{directory}: since this process restored step {restored.step}, another one has saved {steps}; restore "
            "again, to go on from there or, by restore(step=...), to leave that behind"
        )
