"""The command `jaxckpt doctor`, which checks a run and the disk that it is on."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import socket
from typing import Annotated, Any

import typer

from jaxckpt_train._validation import is_url
from jaxckpt_train.cli.output import (
    BACKEND,
    FAST_TIER_HINT,
    Code,
    FastTier,
    Json,
    absolute,
    argument,
    host_directory,
    option,
    print_json,
    print_text,
    progress,
)
from jaxckpt_train.errors import CheckpointError, NotACheckpointError
from jaxckpt_train.inspection.disk_speed import try_disk, try_operations
from jaxckpt_train.inspection.fast_tier import has_fast_tier, host_steps
from jaxckpt_train.inspection.health import RunHealth, health_of
from jaxckpt_train.inspection.object_trials import backend_for_trials, try_objects
from jaxckpt_train.inspection.runs import is_run
from jaxckpt_train.inspection.units import age_text, bytes_text, counted, rate_text
from jaxckpt_train.store.backends.local import IN_MEMORY, FileSystem, file_system_of, mount_warnings
from jaxckpt_train.store.backends.local_names import is_directory
from jaxckpt_train.store.files import file_exists
from jaxckpt_train.store.removal import file_sizes

PACKAGES = ("jaxckpt-train", "jax", "jaxlib", "numpy", "flax", "orbax-checkpoint", "grain", "obstore")
MIB = 1 << 20
ROOM_FOR_STEPS = 2
LEAST_FILES = 1000
FAST_STEPS = 3  # by default two are kept, while another one is written
_NETWORK = re.compile(
    "nfs|cifs|smb|9p|afs|ceph|lustre|gpfs|beegfs|panfs|wekafs|fuse\\.(gluster|ceph|moose|juice|sshfs)"
)
MOST_CLOCK_S = 300.0
_UPLOADS = (
    "a life-cycle rule of the bucket should remove incomplete uploads after a day ({rule}). A killed save leaves them, "
    "they cost money, and no command here can list them, so whether there is such a rule was not checked"
)
_ADVICE = {
    "s3": _UPLOADS.format(rule="AbortIncompleteMultipartUpload"),
    "gs": _UPLOADS.format(rule="AbortIncompleteMultipartUpload"),
    "az": "Azure removes the blocks of incomplete uploads after a week, so no rule is needed for them",
}


def doctor(
    path: Annotated[str, argument("PATH", "A run, or any directory to save to, which need not exist yet.")],
    size_mib: Annotated[int, typer.Option(min=0, help="The size of the file to test the disk. 0: no test.")] = 256,
    fast_tier: FastTier = None,
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts the job has; for --fast-tier.")] = 1,
    port: Annotated[int | None, option("The port of the fast tier, to try whether it is free.", least=1)] = None,
    as_json: Json = False,
) -> None:
    """Examine a run and its disk: versions, free space, speed, owner, damaged steps, and the cost of a crash.

    It tests each operation that a run needs in a temporary directory, and the speed with an unnamed file. At a URL, it
    tests what the credentials permit, the latency and speed, and the clock, in seconds. Exits with 1 if there is a
    warning.
    """
    directory, nbytes = absolute(path), size_mib * MIB
    found = _examine_url(directory, nbytes) if is_url(directory) else _examine(directory, nbytes, as_json)
    if fast_tier is not None:
        newest_bytes = 0 if found["run"] is None else found["run"]["newest_bytes"] or 0
        found["fast_tier"], warnings = _examine_fast_tier(directory, host_directory(fast_tier), newest_bytes, hosts)
        found["warnings"] += warnings
        newest, risk = found["fast_tier"]["newest_step"], found["at_risk"]
        if newest is not None and risk is not None and newest > (risk["since"] or 0):
            risk |= {"since": newest, "updates": max(0, risk["completed"] - newest)}
    if port is not None:
        found["warnings"] += _try_port(port)
    if as_json:
        print_json(found)
    elif is_url(directory):
        _print_url(found)
    else:
        _print(found)
    if fast_tier is None and not as_json and found["run"] is not None and has_fast_tier(BACKEND, directory):
        print_text(FAST_TIER_HINT)
    if found["warnings"]:
        raise typer.Exit(int(Code.WRONG))


def _examine(path: str, nbytes: int, as_json: bool) -> dict[str, Any]:
    folder = path if file_exists(BACKEND, path) else os.path.dirname(path)
    if not is_directory(folder):
        raise NotACheckpointError(f"{path}: expected a directory, or a path in a directory that exists, found neither")
    files, warnings = file_system_of(folder), list[str]()
    run = health_of(BACKEND, path, datetime.datetime.now(datetime.UTC)) if is_run(BACKEND, path) else None
    operations, disk = dict[str, str | None](), None
    try:
        if nbytes:
            operations, size = try_operations(BACKEND, folder), min(nbytes, files.free_bytes // 4)
            with progress("testing the disk", 2 * size, as_json) as advance:
                disk = dataclasses.asdict(try_disk(BACKEND, folder, size, advance))
    except CheckpointError as error:
        warnings.append(f"the disk failed its test: {error}")
    warnings += [
        f"{name}, which a run needs, does not work here: {problem}" for name, problem in operations.items() if problem
    ]
    warnings += mount_warnings(folder)
    warnings += _short_of_room(files, 0 if run is None or run.newest is None else run.newest.nbytes or 0)
    warnings += [] if run is None else run.warnings()
    return {
        "path": path,
        "is_there": file_exists(BACKEND, path),
        "versions": _versions(),
        "file_system": files._asdict(),
        "operations": operations,
        "disk": disk,
        "owner": None if run is None or run.owner is None else run.owner._asdict(),
        "run": None if run is None else _about_run(run),
        "at_risk": None if run is None or run.at_risk is None else run.at_risk._asdict(),
        "warnings": warnings,
    }


def _examine_fast_tier(run: str, path: str, newest_bytes: int, hosts: int) -> tuple[dict[str, Any], list[str]]:
    """Examine the directory of a fast tier on this host; also return warnings."""
    folder = path if file_exists(BACKEND, path) else os.path.dirname(path)
    if not is_directory(folder):
        raise NotACheckpointError(f"{path}: expected a directory, or a path in a directory that exists, found neither")
    files, operations = file_system_of(folder), try_operations(BACKEND, folder)
    steps = host_steps(BACKEND, run, path) if folder == path else []
    warnings = [f"the fast tier needs {name}: {problem}" for name, problem in operations.items() if problem]
    warnings += mount_warnings(folder)
    if _NETWORK.match(files.kind):
        warnings.append(
            f"the fast tier is on {files.kind} at {files.mount}, which is a network file system: choose a local "
            "disk, or memory (tmpfs)"
        )
    # What is here shows what a step takes with copies or parity. Before the first one, assume a copy of each file.
    sizes = [sum(file_sizes(BACKEND, each).values()) for each, _ in steps]
    step_bytes = max(sizes, default=newest_bytes // hosts * min(hosts, 2))
    needed_bytes = step_bytes * max(1, FAST_STEPS - len(steps))
    if files.free_bytes < needed_bytes:
        warnings.append(
            f"the fast tier has {bytes_text(files.free_bytes)} free, and needs {bytes_text(needed_bytes)} more: room "
            f"for {FAST_STEPS} steps of about {bytes_text(step_bytes)} on this host"
        )
    about = {
        "path": path,
        "file_system": files._asdict(),
        "operations": operations,
        "steps": sorted(entry.step for _, entry in steps),
        "newest_step": max((entry.order, entry.step) for _, entry in steps)[1] if steps else None,
        "step_bytes": step_bytes,
        "needed_bytes": needed_bytes,
    }
    return about, warnings


def _try_port(port: int) -> list[str]:
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        return [f"this host cannot listen on port {port}: {error}"]
    return []


def _print_fast_tier(found: dict[str, Any]) -> None:
    files, steps = found["file_system"], found["steps"]
    print_text(f"fast tier: {files['kind']} at {files['mount']}, {bytes_text(files['free_bytes'])} free")
    listing = f": {', '.join(map(str, steps))}" if steps else ""
    size = f", about {bytes_text(found['step_bytes'])} each" if found["step_bytes"] else ""
    print_text(
        f"fast tier: {counted(len(steps), 'step')} of the run on this host{listing}{size}; other hosts not checked"
    )


def _examine_url(path: str, nbytes: int) -> dict[str, Any]:
    backend, warnings = backend_for_trials(), list[str]()
    trial = try_objects(backend, path, nbytes)
    run = None
    if trial.operations["list"] is None:
        try:
            is_there = is_run(backend, path)
            run = health_of(backend, path, datetime.datetime.now(datetime.UTC)) if is_there else None
        except CheckpointError as error:
            warnings.append(f"the run cannot be read: {error}")
    warnings += [f"{name}: {problem}" for name, problem in trial.operations.items() if problem]
    if trial.clock_s is not None and abs(trial.clock_s) > MOST_CLOCK_S:
        warnings.append(
            f"the clock of the storage differs by {age_text(abs(trial.clock_s))}: set the clock of this machine, "
            "because signed requests are refused from 15 minutes on"
        )
    warnings += [] if run is None else run.warnings()
    return {
        "path": path,
        "versions": _versions(),
        "store": dataclasses.asdict(trial),
        "advice": [_ADVICE[path.partition("://")[0]]],
        "owner": None if run is None or run.owner is None else run.owner._asdict(),
        "run": None if run is None else _about_run(run),
        "at_risk": None if run is None or run.at_risk is None else run.at_risk._asdict(),
        "warnings": warnings,
    }


def _print_url(found: dict[str, Any]) -> None:
    store, run = found["store"], found["run"]
    print_text(", ".join(f"{name} {version or 'not installed'}" for name, version in found["versions"].items()))
    works = [name for name, problem in store["operations"].items() if problem is None]
    print_text(f"permitted: {', '.join(works) or 'nothing'}")
    if store["put_s"] is not None:
        print(f"latency: a put of 1 KiB takes {1000 * store['put_s']:.1f} ms, a get {1000 * store['get_s']:.1f} ms")
    if store["write_bytes_per_s"] is not None:
        rates = rate_text(store["write_bytes_per_s"]), rate_text(store["read_bytes_per_s"])
        print_text(f"one object of {bytes_text(store['bytes'])}: writes {rates[0]}, reads {rates[1]}")
    if (clock_s := store["clock_s"]) is not None:
        differs = f"{age_text(abs(clock_s))} {'ahead of' if clock_s > 0 else 'behind'} this machine"
        print(f"clock of the storage: {differs if clock_s else 'the same, to a second'}")
    if run is not None:
        _print_run(run, found["owner"], found["at_risk"])
        if run["stale_files"]:
            count = counted(len(run["stale_files"]), "deleted or unfinished step")
            print(f"the data of {count} is still there; `jaxckpt prune --yes --wait 600` removes it, or a training")
    for advice in found["advice"]:
        print_text(f"advice: {advice}")
    if "fast_tier" in found:
        _print_fast_tier(found["fast_tier"])
    for warning in found["warnings"]:
        print_text(f"warning: {warning}")


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


def _about_run(run: RunHealth) -> dict[str, Any]:
    return {
        "steps": sum(status.entry is not None for status in run.statuses),
        "newest_step": None if run.newest is None else run.newest.step,
        "newest_age_s": run.newest_age_s,
        "newest_bytes": None if run.newest is None else run.newest.nbytes,
        "damaged": run.damaged,
        "uncommitted": run.uncommitted,
        "unreadable": run.refused,
        "stale_files": run.stale_files,
    }


def _print(found: dict[str, Any]) -> None:
    files, disk, operations = found["file_system"], found["disk"], found["operations"]
    print_text(", ".join(f"{name} {version or 'not installed'}" for name, version in found["versions"].items()))
    room = f"{bytes_text(files['free_bytes'])} of {bytes_text(files['total_bytes'])} free"
    print_text(f"file system: {files['kind']} at {files['mount']}, {room}")
    if not found["is_there"]:
        print_text(f"{found['path']}: does not exist yet; its parent directory was tested")
    if operations and not any(operations.values()):
        print_text("all operations that a run needs work")
    if disk is not None:
        works = ["does not work", "works"]
        print(f"direct I/O: writing {works[disk['direct_write']]}, reading {works[disk['direct_read']]}")
        where = "" if disk["direct_read"] else " (from memory)"
        print_text(
            f"disk: writes {rate_text(disk['write_bytes_per_s'])}, of which the sync takes "
            f"{1000 * disk['sync_s']:.1f} ms, reads {rate_text(disk['read_bytes_per_s'])}{where}, "
            f"{bytes_text(disk['bytes'])} each; a small synced file takes {1000 * disk['small_file_s']:.2f} ms"
        )
    if found["run"] is not None:
        _print_run(found["run"], found["owner"], found["at_risk"])
    if "fast_tier" in found:
        _print_fast_tier(found["fast_tier"])
    for warning in found["warnings"]:
        print_text(f"warning: {warning}")


def _print_run(run: dict[str, Any], owner: dict[str, Any] | None, risk: dict[str, Any] | None) -> None:
    if owner is None:
        print("owner: none")
    else:
        state = "alive" if owner["is_alive"] else "dead"
        print_text(f"owner: {owner['name']}, {state}, last heard of {age_text(owner['silent_s'])} ago")
    unread = f"; {len(run['unreadable']):,} cannot be read" if run["unreadable"] else ""
    uncommitted = f"{len(run['uncommitted']):,} not committed"
    print(f"steps: {run['steps']:,} committed, {len(run['damaged']):,} damaged; {uncommitted}{unread}")
    if run["newest_step"] is not None:
        age, size = age_text(run["newest_age_s"]), bytes_text(run["newest_bytes"])
        print_text(f"newest valid step: {run['newest_step']}, {age} old, {size}")
    if risk is None:
        return
    since = "the start" if risk["since"] is None else f"step {risk['since']}"
    updates = f"{counted(risk['updates'], 'update')} since {since}" if risk["updates"] else "nothing"
    heard = age_text(risk["heard_s"])
    if risk["is_live"]:
        print_text(f"if the job died now: {updates} would be lost (last record {heard} ago)")
    else:
        print_text(f"the last training ended {heard} ago ({risk['how']}); lost: {updates}")
