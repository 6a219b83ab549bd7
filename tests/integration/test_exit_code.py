"""The exit code of a script whose last save failed, which ends after the exit functions that were registered later."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import atexit, sys
atexit.register(lambda: print("first", flush=True))
{after_ours}
from jaxckpt_train.pending import start_save
{imports}
atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), print("second", flush=True)))
def fail():
    raise OSError("a disk")
start_save("x", {work})
{ending}
"""


def ended(
    work: str = "fail", imports: str = "", ending: str = "", after_ours: str = ""
) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(work=work, imports=imports, ending=textwrap.dedent(ending), after_ours=after_ours)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("imports", ["", "import tensorstore", "import grain", "import orbax.checkpoint"])
def test_failed_save_exits_with_1_after_later_exit_functions(imports: str) -> None:
    for module in imports.split()[1:]:
        pytest.importorskip(module)
    done = ended(imports=imports)
    assert (done.returncode, done.stdout) == (1, "second\n")
    assert "saving x failed" in done.stderr
    assert done.stderr.count("OSError: a disk") == 1


def test_exit_code_without_failure_is_unchanged() -> None:
    done = ended(work="lambda: None", ending="sys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "second\nfirst\n", "")


@pytest.mark.parametrize(
    "ending",
    ["sys.stdout = sys.stderr = None", "sys.stdout.close()", "sys.stderr.close()", "atexit.register(sys.exit, 9)"],
)
def test_closed_streams_do_not_change_the_exit_code(ending: str) -> None:
    assert ended(ending=ending).returncode == 1


REPLACED = """
class Tee:
    def __init__(self, stream):
        self.stream, self.write, self.flush = stream, stream.write, lambda: None
def replace():
    sys.stdout, sys.stderr = Tee(sys.__stdout__), Tee(sys.__stderr__)
atexit.register(replace)
"""


def test_replaced_streams_do_not_change_the_exit_code() -> None:
    done = ended(ending=f"{REPLACED}atexit.register(lambda: print('third', end=''))")
    assert (done.returncode, done.stdout) == (1, "thirdsecond\n")


LOGS = """
import logging.handlers
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))
logging.getLogger().warning("logged")
"""


def test_log_handlers_are_flushed() -> None:
    assert ended(ending=LOGS).stdout == "second\nlogged\n"


WORKER = """
import multiprocessing, os, threading
if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    worker.start()
    print(worker.pid)
"""


def test_daemon_processes_are_stopped() -> None:
    done = ended(ending=WORKER)  # a worker that lived on would keep the output open, and this would time out
    assert done.returncode == 1


def test_the_process_ends_before_anything_is_freed() -> None:
    freed = """
    class Held:
        def __del__(self):
            print("freed")
    held = Held()
    """
    assert ended(ending=freed).stdout == "second\n"
    assert ended(ending=freed, work="lambda: None").stdout == "second\nfirst\nfreed\n"


def test_unflushed_output_is_written_at_exit() -> None:
    done = ended(ending="print('unflushed', end='')")
    assert (done.returncode, done.stdout) == (1, "unflushedsecond\n")


def test_output_before_replaced_streams_is_flushed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = ended(after_ours=f"print('before', end='')\nsys.stdout = open({str(log)!r}, 'w')", ending="print('after')")
    assert (done.returncode, done.stdout) == (1, "before")
    assert log.read_text() == "after\nsecond\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_full_output_does_not_change_the_exit_code() -> None:
    script = SCRIPT.format(work="fail", imports="", ending="print('never read')", after_ours="")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.DEVNULL, timeout=60, check=False
        )
    assert done.returncode == 1
