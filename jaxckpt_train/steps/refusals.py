"""Saves that a run refuses, since they would go beside what is there, or over it, unasked."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from jaxckpt_train.errors import CheckpointExistsError, SettingsError, StepNotFoundError, StorageError
from jaxckpt_train.formats.flax_directory import certain_checkpoints
from jaxckpt_train.formats.orbax_looks import orbax_steps
from jaxckpt_train.formats.step_folders import LEVANTER, StepFolders, step_folders
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.backend import Entry as Listed
from jaxckpt_train.store.manifest import MANIFEST_NAME
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.transaction import is_committed

_MOST_NAMED = 5
Seen = Mapping[str, datetime.datetime | None]
"""When each step of a run was saved, by the names of the directories; None where that could not be read."""


def refuse_checkpoint(backend: Backend, directory: str) -> None:
    """Raise SettingsError if a checkpoint lies where a run is to be: retention of its own run would delete both."""
    if is_committed(backend, directory) and any(entry.name == MANIFEST_NAME for entry in backend.list(directory)):
        raise SettingsError(
            f"{directory}: is one checkpoint, and no directory of a run: give that of the run which it is a step of; "
            "to begin a new run with its state, give an empty one, and this as `init_from` (or to `jaxckpt_train.load`)"
        )


def refuse_other_steps(backend: Backend, directory: str) -> None:
    """Raise SettingsError if a run is to begin anew where Orbax, Levanter or TorchTitan has left its steps."""
    entries = _listed(backend, directory)
    steps = orbax_steps(backend, directory, entries)
    if steps:
        raise _not_gone_on_from(directory, _orbax_text(steps), list(steps.values())[-1])
    folders = step_folders(backend, directory, entries)
    if folders is not None and folders.tool == LEVANTER:
        raise SettingsError(
            f"{directory}: expected a run of this package or an empty directory, found {_folders_text(folders)}, which "
            "this package does not read: choose another directory"
        )
    if folders is not None:
        raise _not_gone_on_from(directory, _folders_text(folders), folders.names[-1])


def refuse_flax_checkpoints(backend: Backend, directory: str) -> None:
    """As `refuse_other_steps`, for the files of `flax.training.checkpoints`."""
    names = certain_checkpoints(backend, directory, _listed(backend, directory))
    if names:
        raise _not_gone_on_from(directory, _flax_text(names), names[-1])


def _not_gone_on_from(directory: str, found: str, newest: str) -> SettingsError:
    return SettingsError(
        f"{directory}: expected a run of this package or an empty directory, found {found}, which are not gone on "
        "from by themselves: load one by jaxckpt_train.load, or begin a new run with it "
        f"(init_from={directory}/{newest}), and choose another directory"
    )


def of_others(backend: Backend, directory: str, moved: Callable[[], None] = lambda: None) -> str:
    """What other tools have left where a run is looked for; empty: nothing that is known here."""
    entries = _listed(backend, directory)
    steps = orbax_steps(backend, directory, entries)
    if steps:
        return _orbax_text(steps)
    folders = step_folders(backend, directory, entries)
    if folders is not None:
        return _folders_text(folders)
    names = certain_checkpoints(backend, directory, entries)
    return _flax_text(names) if names else ""


def newest_of_orbax(backend: Backend, directory: str) -> int | None:
    """The newest step that Orbax has left where a run is looked for; None: there is none."""
    return next(reversed(orbax_steps(backend, directory, _listed(backend, directory))), None)


def _listed(backend: Backend, directory: str) -> list[Listed]:
    try:
        return list(backend.list(directory))
    except StorageError:
        return []  # there is none, or who saves there is told


def _orbax_text(steps: Mapping[int, str]) -> str:
    return f"steps of Orbax, the last ones {', '.join(map(str, list(steps)[-_MOST_NAMED:]))}"


def _folders_text(folders: StepFolders) -> str:
    return f"steps of {folders.tool}, the last ones {', '.join(folders.names[-_MOST_NAMED:])}"


def _flax_text(names: Sequence[str]) -> str:
    return f"checkpoints of Flax, the last ones {', '.join(names[-_MOST_NAMED:])}"


def refuse_again_or_below(directory: str, step: int, line: Sequence[Entry], restored: Entry | None) -> None:
    """Refuse a step that the run has already, or that would stand beside later ones.

    Args:
        directory: of the run.
        step: that is to be saved.
        line: the steps that the run goes on from.
        restored: the one that this process does, if it has saved none since. Older ones may have higher numbers, as
            where somebody has renamed them: they are left behind then.

    Raises:
        CheckpointExistsError: it is committed.
        SettingsError: it is below one that is.
    """
    steps = {entry.step for entry in line}
    if step in steps:
        raise CheckpointExistsError(
            f"{directory}: step {step} is committed already; pass overwrite=True to publish it anew"
        )
    latest = max(steps, default=step) if restored is None else restored.step
    if latest > step:
        raise SettingsError(
            f"{directory}: expected a step above {latest}, which the run has already, found {step}: restore() first, "
            "to go on from there (or restore(step=...), or overwrite=True, to leave later steps behind), or choose "
            "another directory"
        )


@contextlib.contextmanager
def advised_for_a_loop(directory: str, step: int, saved: int | None) -> Iterator[None]:
    """Within: a step that is refused as it is not above the last is told of with what a loop can do.

    It cannot overwrite, nor restore as it goes.

    Args:
        directory: of the run.
        step: that is to be saved.
        saved: the last one that the loop had saved.
    """
    try:
        yield
    except (CheckpointExistsError, SettingsError) as error:
        if saved is None or step > saved:
            raise
        raise type(error)(
            f"{directory}: expected a step above {saved}, which is saved already, found {step}: number updates over "
            "the whole training (ckpt.steps(...) does, or begin at ckpt.completed_steps after a resume). To go back to "
            "an earlier step and train on from there give it as `init_from` to a run in a new directory, or use "
            "jaxckpt_train.StepManager, by restore(step=...)"
        ) from error


def seen_of(entries: Sequence[Entry]) -> Seen:
    """What a process has seen of a run."""
    return {entry.name: entry.time if entry.is_certain else None for entry in entries}


def unseen_steps(entries: Sequence[Entry], seen: Seen) -> list[int]:
    """What others have saved since."""
    return sorted({entry.step for entry in entries if not _is_seen(entry, seen)})


def refuse_unseen(directory: str, restored: Entry | None, entries: Sequence[Entry], seen: Seen) -> None:
    """Raise CheckpointExistsError if others have saved since this process restored: it would leave that behind.

    Args:
        directory: of the run.
        restored: what this process goes on from; None: it begins from scratch.
        entries: all that there is now.
        seen: what there was when it looked.
    """
    unseen = unseen_steps(entries, seen)
    if unseen:
        steps = ", ".join(map(str, unseen))
        since = "found no step" if restored is None else f"restored step {restored.step}"
        raise CheckpointExistsError(
            f"{directory}: since this process {since}, another one has saved {steps}; restore again, to go on from "
            "there or, by restore(step=...), to leave that behind; or choose another directory"
        )


def _is_seen(entry: Entry, seen: Seen) -> bool:
    """Whether it was there: its name, and where both times could be read, the same save, as names are given again."""
    return entry.name in seen and (not entry.is_certain or seen[entry.name] in (None, entry.time))


def step_not_found(
    directory: str,
    step: int | None,
    there: Collection[Entry],
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> StepNotFoundError:
    """What to say where a run has no such step.

    Args:
        directory: of the run.
        step: which was asked for; None: any.
        there: what it has.
        backend: where to look for what other tools have left, if it has nothing; None: nowhere.
        progress: called with 0 while the disk is waited for.
    """
    steps = ", ".join(str(each) for each in sorted({entry.step for entry in there})) or "none"
    which = "" if step is None else f" {step}; committed are {steps}"
    others = ""
    if backend is not None and not there:
        others = answer_of(directory, functools.partial(of_others, backend, directory), progress)
    found = f"; found {others}" if others else ""
    if others and LEVANTER not in others:
        found += ", which jaxckpt_train.load loads"
    return StepNotFoundError(f"{directory}: has no committed step{which}{found}")
