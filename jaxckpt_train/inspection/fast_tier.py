"""The fast tier of a run as one host sees it from outside of the job: the steps in its directory."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Sequence

from jaxckpt_train.errors import CheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.inspection.runs import StepStatus
from jaxckpt_train.run.catalog import scan, scan_with_record
from jaxckpt_train.run.entry import Entry, left_behind, owning_run
from jaxckpt_train.run.record import FoundRecord
from jaxckpt_train.store.backends.base import GONE, Backend
from jaxckpt_train.store.committed import open_committed
from jaxckpt_train.store.files import file_exists


def has_fast_tier(backend: Backend, run: str) -> bool:
    """Whether a run has, or had, a fast tier: only then its record has its id."""
    return bool(FoundRecord(backend, run).record.run)


def host_steps(backend: Backend, run: str, directory: str) -> list[tuple[str, Entry]]:
    """Return the paths and entries of the steps of a run in the directory of its fast tier on this host.

    Each run has a folder in `directory`, and its steps state the id of the run.
    """
    try:
        folders = [f"{directory}/{each.name}" for each in backend.list(directory) if each.name.startswith("run-")]
    except StorageError as error:
        if error.errno not in {*GONE, errno.ENOTDIR}:
            raise
        raise NotACheckpointError(f"{directory}: expected the directory of a fast tier, found none") from error
    entries, record = scan_with_record(backend, run)
    run_id = record.record.run or owning_run(entries)
    return [
        (f"{folder}/{entry.name}", dataclasses.replace(entry, is_fast=True))
        for folder in folders
        for entry in scan(backend, folder)
        if run_id is not None and entry.run == run_id
    ]


def with_fast_steps(backend: Backend, run: str, directory: str, statuses: Sequence[StepStatus]) -> list[StepStatus]:
    """Return the steps of a run on both tiers, lowest first. `statuses`: those of the run directory."""
    found, slow = host_steps(backend, run, directory), {each.entry.save for each in statuses if each.entry is not None}
    fast = {entry.save for _, entry in found}
    entries = [each.entry for each in statuses if each.entry is not None] + [entry for _, entry in found]
    left = left_behind(
        sorted(entries, key=lambda entry: entry.order), scan_with_record(backend, run)[1].record.roll_back
    )
    both = [
        dataclasses.replace(
            each,
            tier="both" if each.entry is not None and each.entry.save in fast else "slow",
            is_current=each.is_current and each.name not in left,
        )
        for each in statuses
    ]
    both += [_status(backend, path, entry, left) for path, entry in found if entry.save not in slow]
    return sorted(both, key=lambda each: (each.step, each.name))


def _status(backend: Backend, path: str, entry: Entry, left: frozenset[str]) -> StepStatus:
    status = StepStatus(entry.name, entry.step, entry, None, entry.name not in left, None, tier="fast")
    try:
        committed = open_committed(backend, path, is_complete=False)
    except CheckpointError as error:
        return dataclasses.replace(status, problem=str(error))
    manifest = committed.manifest
    names = [each.file for each in manifest.segments] + [each.file for part in manifest.parts for each in part.files]
    absent = sum(not file_exists(backend, f"{path}/{name}") for name in names)
    return dataclasses.replace(status, nbytes=committed.data_bytes, absent_files=absent)
