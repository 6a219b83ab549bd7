"""Shared memory in real jobs: what the processes see in it, and that loads leave none of it open."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from traceback import extract_stack
from typing import Any

import jax
import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed import shared_memory
from jaxckpt_train.distributed.shared_memory import SharedMemory
from jaxckpt_train.store.segment import ALIGNMENT
from tests.support.jobs.arrays import digest_of
from tests.support.jobs.counted_loads import Arrays, save_alone, target_of
from tests.support.jobs.fixtures import JobOf
from tests.support.open_memory import left_open
from tests.support.tiers import nightly_after

ARRAYS: Arrays = {"a": ([3072, 1024], "float32"), "b": ([1024, 3072], "float32")}
TIMES = 5


def load_once(path: str, spec: list[Any], progress: Any = None, budget: int = 8 << 20) -> str:
    """Load, and return the digest of the arrays, or the name of the error."""
    settings = jct.StoreSettings(read_once=True, barrier_timeout_s=5.0, read_budget_bytes=budget)
    target = target_of(ARRAYS, dict.fromkeys(ARRAYS, spec), [4])
    try:
        return str(digest_of(jct.load(path, target, settings=settings, progress=progress)))
    except (jct.CheckpointError, KeyboardInterrupt) as error:
        return type(error).__name__


def refuse(done: int) -> None:
    if done:
        raise jct.SettingsError("no more of it")


def interrupt(done: int) -> None:
    if done == 0 and any(frame.name == "read" and "redistribution" in frame.filename for frame in extract_stack()):
        raise KeyboardInterrupt


PROGRESS = {"progress": refuse, "interrupt": interrupt}


def refuse_address(_: object) -> Any:
    raise OSError(errno.ENOSYS, "not here")


def load_and_count(path: str, kind: str, who: int) -> dict[str, Any]:
    """Load several times, and return the outcomes and the numbers of open files and memories after each."""
    is_affected = jax.process_index() == who
    outcomes, counts = list[str](), list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        if is_affected and kind in ("Channel", "SharedMemory"):
            patch.setattr(shared_memory, kind, refuse_address)
        for _ in range(TIMES):
            spec = ["x"] if kind == "sharding" and is_affected else []
            outcomes.append(load_once(path, spec, PROGRESS.get(kind) if is_affected else None))
            counts.append(left_open())
    return {"outcomes": sorted(set(outcomes)), "counts": counts}


@pytest.mark.parametrize(
    ("kind", "here", "elsewhere"),
    nightly_after(
        2,
        [
            ("", None, None),
            ("sharding", "OtherProcessError", "OtherProcessError"),
            ("progress", "SettingsError", "SettingsError"),
            ("interrupt", "KeyboardInterrupt", "OtherProcessError"),
            ("Channel", None, None),
            ("SharedMemory", None, None),
        ],
    ),
)
def test_loads_leave_no_shared_memory(
    tmp_path: Path, job_of: JobOf, kind: str, here: str | None, elsewhere: str | None
) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    answers = job_of(4, 1).call(load_and_count, str(tmp_path / "c"), kind, 2)
    digest = answers[0]["outcomes"][0]
    for number, answer in enumerate(answers):
        assert answer["outcomes"] == [(here if number == 2 else elsewhere) or digest]
        first, *more = answer["counts"]
        assert more == [first] * len(more)
        assert first[1] == 0


def load_with_signals(path: str) -> list[str]:
    """Load in a script that restored the default action of SIGPIPE."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return [load_once(path, []) for _ in range(TIMES)]
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_finished_reader_ends_no_process_by_sigpipe(tmp_path: Path, job_of: JobOf) -> None:
    save_alone(str(tmp_path / "c"), ARRAYS)
    answers = job_of(4, 1).call(load_with_signals, str(tmp_path / "c"))
    assert len({each for answer in answers for each in answer}) == 1


pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")

LOOK = """
import sys
from jaxckpt_train.distributed.shared_memory import open_memory
data = open_memory(bytes.fromhex(sys.argv[1]))
print(data.sum(), data.flags.writeable, data.ctypes.data % 4096)
"""


def test_another_process_sees_what_was_written(run_python: Any) -> None:
    memory = SharedMemory(100_000)
    assert memory.data.ctypes.data % ALIGNMENT == 0
    memory.data[:] = 3
    assert run_python(LOOK, memory.address.hex(), check=True).stdout == "300000 False 0\n"
    memory.hide()
