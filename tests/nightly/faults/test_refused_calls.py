"""Sandboxes refuse system calls; each optional call has a substitute."""

from __future__ import annotations

import errno
import platform
import sys
from pathlib import Path

import pytest

from tests.conftest import RunPython

# By architecture. The numbers in one line belong to one operation of Python or of the C library.
_CALLS = {
    "x86_64": {
        "renameat2": [316],
        "link": [86, 265],
        "memfd_create": [319],
        "madvise": [28],
        "setpriority": [141],
        "statx": [332],
        "fallocate": [285],
        "fadvise64": [221],
        "copy_file_range": [326],
        "mlock": [149, 325],
        "sched_getaffinity": [204],
        "io_uring_setup": [425],
        "symlink": [88, 266],
        "pipe2": [293],
    },
    "aarch64": {
        "renameat2": [276],
        "link": [37],
        "memfd_create": [279],
        "madvise": [233],
        "setpriority": [140],
        "statx": [291],
        "fallocate": [47],
        "fadvise64": [223],
        "copy_file_range": [285],
        "mlock": [228, 284],
        "sched_getaffinity": [123],
        "io_uring_setup": [425],
        "symlink": [36],
        "pipe2": [59],
    },
}.get(platform.machine(), {})
_ERRORS = ("EPERM", "ENOSYS", "EINVAL", "EOPNOTSUPP")
PROGRAM = """
import ctypes, os, struct, sys
import numpy as np
import jaxckpt_train as jct

root, answer, *numbers = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

def instruction(code, true, false, value):
    return struct.pack("=HBBI", code, true, false, value)

def refuse(numbers, answer):  # prctl(PR_SET_NO_NEW_PRIVS), prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER)
    load = instruction(0x20, 0, 0, 0)
    tests = [instruction(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    ends = [instruction(0x06, 0, 0, 0x7FFF0000), instruction(0x06, 0, 0, 0x00050000 | answer)]
    code = b"".join([load, *tests, *ends])
    memory = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(memory)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no PR_SET_NO_NEW_PRIVS"
    if libc.prctl(22, 2, program) != 0:
        print("SKIP")
        sys.exit()

refuse([int(number) for number in numbers], int(answer))
for number in numbers:
    assert libc.syscall(int(number), -1, -1, -1, -1, -1) == -1 and ctypes.get_errno() == int(answer)

def state_of(step):
    return {"small": np.arange(step), "large": np.random.default_rng(step).normal(size=700_001)}

def check(found, step):
    for name, value in state_of(step).items():
        np.testing.assert_array_equal(found[name], value)

for direct in ("auto", False):
    settings = jct.StoreSettings(direct_io=direct)
    path = f"{root}/one-{direct}"
    for step in (1, 2):
        jct.save(path, state_of(step), overwrite=step > 1, settings=settings)
        check(jct.load(path, settings=settings), step)
with jct.StepManager(f"{root}/run", preservation_policy=jct.LatestN(2)) as manager:
    for step in range(1, 5):
        manager.save(step, {"state": state_of(step)})
        manager.wait()
with jct.StepManager(f"{root}/run") as manager:
    check(manager.restore()["state"], 4)
    assert manager.steps == [3, 4]
assert sorted(os.listdir(root)) == ["one-False", "one-auto", "run"], os.listdir(root)
assert not [name for name in os.listdir(f"{root}/run") if name.startswith(".")]
print("ok")
"""


@pytest.mark.skipif(sys.platform != "linux" or not _CALLS, reason="needs Linux on x86_64 or aarch64")
@pytest.mark.parametrize(
    ("call", "error"),
    [(call, error) for call in _CALLS for error in _ERRORS],
)
def test_a_refused_call_has_a_substitute(tmp_path: Path, run_python: RunPython, call: str, error: str) -> None:
    numbers = [str(number) for number in _CALLS[call]]
    done = run_python(PROGRAM, tmp_path, str(getattr(errno, error)), *numbers, check=True)
    if done.stdout == "SKIP\n":
        pytest.skip("cannot install a filter of system calls")
    assert done.stdout == "ok\n"
