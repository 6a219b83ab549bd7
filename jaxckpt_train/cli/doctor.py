"""The command `jaxckpt doctor`, which checks a run and the disk that it is on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Annotated, Any, NamedTuple

import typer

from jaxckpt_train.cli.output import (
    BACKEND,
    Code,
    Json,
    absolute,
    argument,
    print_json,
    print_text,
    progress,
)
from jaxckpt_train.errors import CheckpointError, NotACheckpointError
from jaxckpt_train.inspection.disk_speed import DiskTrial, Operation, try_disk, try_operations
from jaxckpt_train.inspection.health import AtRisk, RunHealth, health_of
from jaxckpt_train.inspection.runs import is_run
from jaxckpt_train.inspection.units import age_text, bytes_text, counted, rate_text
from jaxckpt_train.store.backends.local import (
    IN_MEMORY,
    FileSystem,
    file_exists,
    file_system_of,
    is_file,
    mount_warnings,
)
from jaxckpt_train.store.backends.local_names import is_directory, link_target

PACKAGES = ("jaxckpt-train", "jax", "jaxlib", "numpy", "flax", "orbax-checkpoint", "grain")
MIB = 1 << 20
ROOM_FOR_STEPS = 2
LEAST_FILES = 1000


class _Found(NamedTuple):
    path: str
    is_there: bool
    versions: dict[str, str | None]
    files: FileSystem
    operations: list[Operation]
    trial: DiskTrial | None
    run: RunHealth | None
    warnings: list[str]


def doctor(
    path: Annotated[str, argument("PATH", "A run, or any directory to save to, which need not exist yet.")],
    size_mib: Annotated[
        int, typer.Option("--size-mib", min=0, help="The size of the file for the test of the disk. 0: no test.")
    ] = 256,
    as_json: Json = False,
) -> None:
    """Examine a run and its disk: versions, free space, speed, owner, damaged steps, and the cost of a crash.

    It tests each operation that a run needs in a temporary directory, and the speed with an unnamed file. Exits with 1
    if there is a warning.
    """
    found = _examine(absolute(path), size_mib * MIB, as_json)
    if as_json:
        print_json(_json_of(found))
    else:
        _print(found)
    if found.warnings:
        raise typer.Exit(int(Code.WRONG))


def _examine(path: str, nbytes: int, as_json: bool) -> _Found:
    folder = path if file_exists(path) else os.path.dirname(path)
    if not is_directory(folder):
        found = _what_is_at(folder)
        raise NotACheckpointError(f"{path}: expected a directory, or a path in a directory that exists, found {found}")
    files, warnings = file_system_of(folder), list[str]()
    run = health_of(BACKEND, path, datetime.datetime.now(datetime.UTC)) if is_run(BACKEND, path) else None
    operations, trial = list[Operation](), None
    try:
        operations = try_operations(BACKEND, folder) if nbytes else []
        nbytes = min(nbytes, files.free_bytes // 4)
        if nbytes:
            with progress("testing the disk", 2 * nbytes, as_json) as advance:
                trial = try_disk(BACKEND, folder, nbytes, advance)
    except CheckpointError as error:
        warnings.append(f"the disk failed its test: {error}")
    warnings += [
        f"{operation.name}, which a run needs, does not work here: {operation.problem}"
        for operation in operations
        if operation.problem and operation.is_needed
    ]
    warnings += mount_warnings(folder)
    newest = None if run is None else run.newest
    warnings += _short_of_room(files, 0 if newest is None else newest.nbytes or 0)
    warnings += [] if run is None else run.warnings()
    return _Found(path, file_exists(path), _versions(), files, operations, trial, run, warnings)


def _what_is_at(path: str) -> str:
    """Describe what exists in place of a directory."""
    if is_file(path):
        return "a file"
    if link_target(path) is not None:
        return "a broken link"
    return "another kind of file" if file_exists(path) else "nothing"


def _short_of_room(files: FileSystem, newest_bytes: int) -> list[str]:
    found = list[str]()
    if files.free_bytes < max(MIB, ROOM_FOR_STEPS * newest_bytes):
        found.append(
            f"only {bytes_text(files.free_bytes)} is free, a step takes {bytes_text(newest_bytes)}: free some space"
        )
    if files.free_files is not None and files.free_files < LEAST_FILES:
        found.append(f"the file system has room for only {files.free_files} more files: remove some")
    if files.kind in IN_MEMORY:
        found.append(f"{files.kind} at {files.mount} is in memory: its files are lost when this machine restarts")
    return found


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _json_of(found: _Found) -> dict[str, Any]:
    run, trial = found.run, found.trial
    disk = None if trial is None else {
        "bytes": trial.nbytes, "direct_write": trial.direct_write, "direct_read": trial.direct_read,
        "write_bytes_per_s": trial.write_bytes_per_s, "sync_s": trial.sync_s,
        "read_bytes_per_s": trial.read_bytes_per_s, "small_file_s": trial.small_s,
    }  # fmt: skip
    about_run = None if run is None else {
        "steps": run.committed, "newest_step": None if run.newest is None else run.newest.step,
        "newest_age_s": run.newest_age_s, "newest_bytes": None if run.newest is None else run.newest.nbytes,
        "damaged": run.damaged, "uncommitted": run.uncommitted, "unreadable": run.refused,
        "stale_files": run.stale_files,
    }  # fmt: skip
    return {
        "path": found.path,
        "is_there": found.is_there,
        "versions": found.versions,
        "file_system": found.files._asdict(),
        "operations": {operation.name: operation.problem for operation in found.operations},
        "disk": disk,
        "owner": None if run is None or run.owner is None else run.owner._asdict(),
        "run": about_run,
        "at_risk": None if run is None or run.at_risk is None else run.at_risk._asdict(),
        "warnings": found.warnings,
    }


def _print(found: _Found) -> None:
    files, trial, run = found.files, found.trial, found.run
    print_text(", ".join(f"{name} {version or 'not installed'}" for name, version in found.versions.items()))
    print_text(f"file system: {files.kind} at {files.mount}, {bytes_text(files.free_bytes)} of "
          f"{bytes_text(files.total_bytes)} free")  # fmt: skip
    if not found.is_there:
        print_text(f"{found.path}: does not exist yet; its parent directory was tested")
    for operation in found.operations:
        if operation.problem and not operation.is_needed:
            print_text(f"{operation.name}: {operation.problem}")
    if found.operations and not any(each.problem for each in found.operations if each.is_needed):
        print_text("all operations that a run needs work")
    if trial is not None:
        works = ["does not work", "works"]
        print(f"direct I/O: writing {works[trial.direct_write]}, reading {works[trial.direct_read]}")
        where = "" if trial.direct_read else " (from memory)"
        print_text(f"disk: writes {rate_text(trial.write_bytes_per_s)}, of which the sync takes "
              f"{1000 * trial.sync_s:.1f} ms, reads {rate_text(trial.read_bytes_per_s)}{where}, "
              f"{bytes_text(trial.nbytes)} each; a small synced file takes {1000 * trial.small_s:.2f} ms")  # fmt: skip
    if run is not None:
        _print_run(run)
    for warning in found.warnings:
        print_text(f"warning: {warning}")


def _print_run(run: RunHealth) -> None:
    owner = run.owner
    if owner is None:
        print("owner: none")
    else:
        state = "alive" if owner.is_alive else "dead"
        print_text(f"owner: {owner.name}, {state}, last heard of {age_text(owner.silent_s)} ago")
    unread = f"; {len(run.refused):,} cannot be read" if run.refused else ""
    counts = f"{run.committed:,} committed, {len(run.damaged):,} damaged; {len(run.uncommitted):,} not committed"
    print(f"steps: {counts}{unread}")
    if run.newest is not None and run.newest_age_s is not None:
        print_text(
            f"newest valid step: {run.newest.step}, {age_text(run.newest_age_s)} old, {bytes_text(run.newest.nbytes)}"
        )
    if run.at_risk is not None:
        print_text(_risk_text(run.at_risk))


def _risk_text(risk: AtRisk) -> str:
    since = "the start" if risk.since is None else f"step {risk.since}"
    updates = f"{counted(risk.updates, 'update')} since {since}" if risk.updates else "nothing"
    heard = age_text(risk.heard_s)
    if risk.is_live:
        return f"if the job died now: {updates} would be lost (last record {heard} ago)"
    was = "were" if risk.updates > 1 else "was"
    return f"the last training ended {heard} ago ({risk.how}), and {updates} {was} lost"
