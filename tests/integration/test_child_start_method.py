"""A child of `multiprocessing` that sets another start method than its own also ends after its saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import atexit, multiprocessing, sys, threading
from pathlib import Path
never = threading.Event()

def saves(path):
    from jaxckpt_train import pending
    from jaxckpt_train.pending import start_save
    def work():
        never.wait(0.3)  # as a disk would take
        {work}
        Path(path).touch()
    while {is_late} and sys.version_info < (3, 13) and not pending.process_is_ending():
        never.wait(0.01)  # the function of the child has returned by then; later, Python waits for threads before that
    start_save("x", work)

def child(path, method):
    multiprocessing.set_start_method(method, force=True)
    atexit.register(print, "exit function", flush=True)
    if {is_late}:
        threading.Thread(target=saves, args=(path,)).start()
    else:
        saves(path)

if __name__ == "__main__":
    how, method, path = sys.argv[1:]
    process = multiprocessing.get_context(how).Process(target=child, args=(path, method))
    process.start()
    process.join(60)
    print("exit code", process.exitcode)
"""


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("work", "code"), [("pass", 0), ("raise OSError('a disk')", 1)])
@pytest.mark.parametrize(("how", "method"), [("fork", "spawn"), ("forkserver", "spawn"), ("spawn", "fork")])
def test_child_with_other_start_method_finishes_its_saves(
    how: str, method: str, work: str, code: int, is_late: bool, tmp_path: Path, run_python: Any
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(work=work, is_late=is_late))
    done = run_python(script, how, method, tmp_path / "saved", check=True)
    *before, last = done.stdout.splitlines()
    assert last == f"exit code {code}", done.stderr
    assert (tmp_path / "saved").exists() == (code == 0)
    assert done.stderr.count("OSError: a disk") == code
    if how == "spawn" and not (is_late and code):  # it ends as Python does
        assert before == ["exit function"]
