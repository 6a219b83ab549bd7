"""Proofs whose runs all happen in this process in turn; an error ends the interrupted ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxckpt_train import loop as loop_observer
from jaxckpt_train.testing.processes import Plan, ScriptTarget
from jaxckpt_train.testing.recorder import InterruptedRunError, Recorder
from jaxckpt_train.testing.resume_proof import ResumeProof, Runner, prove

MakeRun = Callable[[Path], object]


def prove_here(make_run: MakeRun, directory: Path, *kill_at: int, ignored: tuple[str, ...] = ()) -> ResumeProof:
    """Like `assert_resume_exact(..., how="raise")`, but in this process and for any function."""

    def start(folder: Path, timeout_s: float) -> int:
        plan = Plan.read(folder)
        loop_observer.observe(Recorder(folder, plan))
        try:
            make_run(Path(plan.directory))
        except InterruptedRunError:
            return 1
        finally:
            loop_observer.observe(None)
        return 0

    return prove(Runner(ScriptTarget(()), directory, "raise", 60.0, ignored, start), kill_at)
