"""Problems of trainers and launchers outside of JAX: signal handlers, wrong file times, file modes, the best step."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.conftest import RunPython
from tests.support.commands import printed
from tests.support.runs import state_of, step_of

REQUEUED = """
import os
import signal
import sys
import jaxckpt_train as jct
from tests.support.runs import state_of

def requeue(number, frame):  # as submitit does; its controller restarts jobs with this exit code
    sys.exit(144)

signal.signal(signal.SIGUSR2, requeue)
with jct.CheckpointCallback(sys.argv[1], on_preemption=sys.argv[2]) as ckpt:
    state = ckpt.resume(state_of(0))
    for step in ckpt.steps(9):
        print(step, flush=True)
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGUSR2)
        state = state_of(step + 1)
        ckpt(state)
"""


@pytest.mark.parametrize("on_preemption", ["exit", "raise"])
def test_exiting_handler_keeps_code_and_updates(run_python: RunPython, on_preemption: str, tmp_path: Path) -> None:
    seen: list[str] = []
    for code, latest, asked_in in [(144, 3, 3), (144, 7, 7), (0, 9, -1)]:
        done = run_python(REQUEUED, tmp_path, on_preemption, str(asked_in))
        assert done.returncode == code, done.stderr
        seen += done.stdout.split()
        assert step_of(jct.StepManager(tmp_path).restore()) == latest
    assert seen == ["0", "1", "2", "3", "3", "4", "5", "6", "7", "7", "8"]


def times(how: str) -> Iterator[float]:
    """Yield modification times that do not follow the order of the writes."""
    start, change = {"epoch": (0.0, 0.0), "backwards": (2e9, -1000.0), "later than now": (4e9, 1.0)}[how]
    while True:
        yield start
        start += change


@pytest.mark.parametrize("how", ["epoch", "backwards", "later than now"])
def test_file_times_are_ignored(how: str, tmp_path: Path) -> None:
    given = times(how)
    for last in (4, 8, 12):
        with jct.CheckpointCallback(tmp_path, save_interval_steps=2, keep_latest=3) as ckpt:
            assert step_of({"state": ckpt.resume(state_of(0))}) == last - 4
            for step in ckpt.steps(last):
                ckpt(state_of(step + 1))
                ckpt.wait_until_finished()
                for folder, names, files in os.walk(tmp_path):  # some may be deleted meanwhile
                    for path in [Path(folder, name) for name in [*names, *files] if "step-" in folder + name]:
                        with contextlib.suppress(FileNotFoundError):
                            os.utime(path, (time := next(given), time))
        assert jct.StepManager(tmp_path).steps == list(range(max(2, last - 4), last + 1, 2))


def saved_run(path: Path) -> None:
    with jct.StepManager(path, best_link=jct.BestLink("loss")) as manager:
        for step in (1, 2):
            manager.save(step, {"state": state_of(step)}, metrics={"loss": step})
        manager.wait()
        manager.pin(1)


def saved_twice(path: Path) -> None:
    jct.save(path, state_of(1))
    jct.save(path, state_of(2), overwrite=True)


def exported(form: str) -> Callable[[Path], None]:
    def export(path: Path) -> None:
        jct.save(path.with_name("source"), state_of(1))
        printed("export", path.with_name("source"), path, "--to", form)

    return export


@pytest.mark.parametrize("umask", [0o002, 0o027])
@pytest.mark.parametrize("write", [saved_run, saved_twice, exported("safetensors"), exported("orbax")])
def test_written_files_have_the_usual_modes(write: Callable[[Path], None], umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "written")
    finally:
        os.umask(before)
    found = [path for path in (tmp_path / "written").rglob("*") if not path.is_symlink()]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found}
    assert modes <= {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}
    assert (False, 0o666 & ~umask) in modes


def test_best_step_survives_restarts_and_a_move(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0, float("nan"), 5.0, 4.0]
    run = tmp_path / "run"
    for last in (3, 4, 6):
        with jct.CheckpointCallback(
            run, save_interval_steps=1, keep_latest=1, keep_best=1, best_metric="loss", best_link=True
        ) as ckpt:
            ckpt.resume(state_of(0))
            for step in ckpt.steps(last):
                ckpt(state_of(step + 1), metrics={"loss": losses[step]})
        assert jct.StepManager(run).steps == [2, last]
    shutil.move(run, tmp_path / "moved")
    assert int(jct.load(tmp_path / "moved" / "best")["step"]) == 2
    with jct.CheckpointCallback(tmp_path / "moved", keep_latest=1, keep_best=1, best_metric="loss") as ckpt:
        ckpt.resume(state_of(0))
        assert (ckpt.completed_steps, ckpt.manager.best("loss")) == (6, 2)


@pytest.mark.parametrize("step", [1, 2])
def test_older_step_is_read_whole_and_partly(step: int, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.safetensors"
    with jct.StepManager(run) as manager:
        for each in (1, 2, 3):
            manager.save(each, {"state": state_of(each)})
        path = manager.path(step)
        assert step_of(manager.load({"state": state_of(0)}, step=step)) == step
    assert jct.load(path, only="w")["w"][0] == step
    for start in (str(path), {"path": str(path), "only": "w"}):
        with jct.CheckpointCallback(tmp_path / f"new-{type(start).__name__}", init_from=start) as ckpt:
            assert ckpt.resume(state_of(0))["w"][0] == step
    printed("export", run, out, "--to", "safetensors", "--only", "w", "--step", step)
    assert np.asarray(jct.load(out)["w"])[0] == step


def test_another_batch_size_changes_the_fingerprint(tmp_path: Path) -> None:
    def samples(batch_size: int, num_steps: int, **options: str) -> list[int]:
        def batches(start: int) -> Iterator[range]:
            return (range(number * batch_size, (number + 1) * batch_size) for number in itertools.count(start))

        seen: list[int] = []
        with jct.CheckpointCallback(tmp_path, **options) as ckpt:  # type: ignore[arg-type]
            state, data = ckpt.resume(state_of(0), jct.CountedIterator(batches))
            for _ in ckpt.steps(num_steps):
                seen += next(data)
                ckpt(state)
        return seen

    first = samples(4, 3, fingerprint="batch=4")
    with pytest.raises(jct.IteratorStateError, match="found 'batch=8'"):
        samples(8, 5, fingerprint="batch=8")
    assert first + samples(4, 5, fingerprint="batch=4") == list(range(20))
