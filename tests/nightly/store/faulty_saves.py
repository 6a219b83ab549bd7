"""Runs under `faults.c`: save, load and die on a failing file system, and print the results as JSON.

LD_PRELOAD=faults.so python faulty_saves.py SCENARIO DIRECTORY
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxckpt_train.errors import CheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.removal import final_name, remove_dead_attempts
from jaxckpt_train.store.transaction import Transaction
from jaxckpt_train.store.verify import verify
from tests.support.checkpoints import commit, load

FAULTS = ctypes.CDLL(None)
BACKEND = LocalBackend()
MIB = 1 << 20
OLD = {"x": np.zeros(5000, np.uint8), "y": np.arange(70_000.0)}
NEW = {"x": np.ones(5000, np.uint8), "y": np.arange(70_000.0) + 1}
LARGE = {"x": np.random.default_rng(0).integers(0, 256, 5 * MIB + 17, np.uint8), "y": np.arange(9)}
SETTINGS = StoreSettings(staging_bytes=MIB, segment_bytes=2 * MIB, io_threads=1)


@contextlib.contextmanager
def faults(root: str, call: str, mode: str, at: int = 0, every: int = 0) -> Iterator[list[int]]:
    """Inject faults below a directory; yield a list that receives the number of counted calls."""
    counted: list[int] = []
    FAULTS.faults_set(root.encode(), call.encode(), ord(mode), ctypes.c_long(at), ctypes.c_long(every))
    try:
        yield counted
    finally:
        counted.append(FAULTS.faults_set(b"", b"", 0, ctypes.c_long(0), ctypes.c_long(0)))


def save(path: str, arrays: dict[str, np.ndarray], *, replace: bool = False, settings: Any = SETTINGS) -> None:
    """Save, and remove a failed attempt as the layers above do."""
    try:
        commit(BACKEND, path, arrays, settings, replace=replace)
    except StorageError:
        parent = os.path.dirname(path)
        for name in filter(final_name, os.listdir(parent)):
            shutil.rmtree(os.path.join(parent, name))
        raise


def content(path: str) -> str:
    """Return which arrays a checkpoint holds: "old", "new", "large", "nothing", or its damage."""
    try:
        found = {name: parts[0].tobytes() for name, parts in load(BACKEND, path, SETTINGS).items()}
    except NotACheckpointError:
        return "nothing"
    except CheckpointError as error:
        return f"damaged: {error}"
    for name, arrays in {"old": OLD, "new": NEW, "large": LARGE}.items():
        if found == {key: array.tobytes() for key, array in arrays.items()}:
            return name
    return "something else"


def count(root: str, call: str, replace: bool) -> int:
    """Return the number of calls that one save makes."""
    if replace:
        save(f"{root}/probe", OLD)
    with faults(root, call, "c") as counted:
        save(f"{root}/probe", NEW, replace=replace)
    shutil.rmtree(f"{root}/probe")
    return counted[0]


def survive(root: str) -> list[Any]:
    """Inject faults that must be invisible, in saves and in loads."""
    ends = []
    for direct in ("auto", False):
        settings = StoreSettings(staging_bytes=MIB, segment_bytes=2 * MIB, direct_io=direct)
        for call, mode, every in [("write", "h", 1), ("write", "h", 2), ("write", "i", 2), ("sync", "i", 2),
                                  ("cut", "i", 2), ("read", "h", 1), ("read", "h", 3), ("read", "i", 2)]:  # fmt: skip
            if call == "cut" and direct is False:
                continue  # only files written in whole blocks are truncated
            with faults(root, call, mode, every=every) as counted:
                save(f"{root}/a", LARGE, settings=settings)
                found = content(f"{root}/a")
                report = verify(BACKEND, f"{root}/a", settings)
            ends.append([f"{call} {mode} {every} {direct}", counted[0], found, report.problems])
            shutil.rmtree(f"{root}/a")
    return ends


def fail(root: str, replace: bool, deny_renameat2: bool) -> list[Any]:
    """Let each call of a save fail in turn."""
    FAULTS.faults_deny_renameat2(int(deny_renameat2))
    ends = []
    for mode in ("e", "s"):
        for at in range(1, count(root, "", replace) + 1):
            path = f"{root}/a"
            if replace:
                save(path, OLD)
            try:
                with faults(root, "", mode, at=at):
                    save(path, NEW, replace=replace)
                error: list[Any] = [0, "no error"]
            except StorageError as refusal:
                error = [refusal.errno, str(refusal)]
            ends.append([mode, at, *error, content(path), sorted(os.listdir(root))])
            for left in os.listdir(root):
                shutil.rmtree(f"{root}/{left}")
    return ends


def die(root: str, replace: bool, deny_renameat2: bool) -> list[Any]:
    """Kill the process at each call of a save in turn, and save again."""
    FAULTS.faults_deny_renameat2(int(deny_renameat2))
    ends = []
    for mode in ("k", "t"):
        for at in range(1, count(root, "", replace) + 1):
            path = f"{root}/a"
            if replace:
                save(path, OLD)
            child = os.fork()
            if child == 0:
                with faults(root, "", mode, at=at):
                    commit(BACKEND, path, NEW, SETTINGS, replace=replace)
                os._exit(0)
            died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found = content(path)
            Transaction(BACKEND, path, SETTINGS).abort()
            remove_dead_attempts(BACKEND, path)
            commit(BACKEND, path, NEW, SETTINGS, replace=True)
            ends.append([mode, at, died, found, content(path), sorted(os.listdir(root))])
            for left in os.listdir(root):
                shutil.rmtree(f"{root}/{left}")
    return ends


def fail_to_read(root: str) -> list[Any]:
    """Let each read of a load fail in turn."""
    save(f"{root}/a", LARGE)
    with faults(root, "read", "c") as counted:
        content(f"{root}/a")
    ends = []
    for at in range(1, counted[0] + 1):
        try:
            with faults(root, "read", "e", at=at):
                load(BACKEND, f"{root}/a", SETTINGS)
            ends.append([at, 0, "no error"])
        except StorageError as refusal:
            ends.append([at, refusal.errno, str(refusal)])
    return ends


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # about a fork of a process with threads
    scenario, root = sys.argv[1:]
    chosen = {"replace": "replacing" in scenario, "deny_renameat2": "without renameat2" in scenario}
    run: Any = {"fail": fail, "die": die}.get(scenario.split(",")[0])
    if run is not None:
        print(json.dumps(run(root, **chosen)))
    else:
        print(json.dumps({"survive": survive, "fail to read": fail_to_read}[scenario](root)))
