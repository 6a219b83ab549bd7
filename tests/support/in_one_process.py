"""Proofs whose runs all happen in this process in turn; an error ends the interrupted ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from jaxckpt_train import loop as loop_observer
from jaxckpt_train.testing.attempts import Runner
from jaxckpt_train.testing.processes import ProcessFiles, RecordWriter, ScriptTarget
from jaxckpt_train.testing.recorder import InterruptedRunError, Recorder
from jaxckpt_train.testing.resume_proof import ResumeProof, prove

MakeRun = Callable[[Path], object]


def prove_here(
    make_run: MakeRun, directory: Path, *kill_at: int, ignores: Callable[[str], bool] = lambda name: False
) -> ResumeProof:
    """Like `assert_resume_exact(..., how="raise")`, but in this process and for any function."""

    def start(plan_file: Path, log: Path, timeout_s: float) -> int:
        files, plan = ProcessFiles.of_plan(plan_file)
        with contextlib.closing(RecordWriter(files)) as writer:
            loop_observer.observe(Recorder(writer, plan))
            try:
                make_run(Path(plan.directory))
            except InterruptedRunError:
                return 1
            finally:
                loop_observer.observe(None)
        return 0

    not_run = ScriptTarget(())
    return prove(Runner(not_run, directory, "raise", 60.0, start, ignores), kill_at)
