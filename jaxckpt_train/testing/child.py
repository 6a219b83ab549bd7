"""A watched process: records the loop of what its plan names, and runs that."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

from jaxckpt_train.steps import loop_observer
from jaxckpt_train.testing.record_files import ProcessFiles, RecordWriter
from jaxckpt_train.testing.recorder import Recorder
from jaxckpt_train.testing.run_target import run

STACKS_BEFORE = 0.2
"""So long before its time is over, as a share of that, it prints where its threads are: if it hangs, the log tells."""
LEAST_S = 0.01


def main(plan_file: str) -> None:
    """Run what a plan names."""
    files, plan = ProcessFiles.of_plan(Path(plan_file))
    faulthandler.enable()
    left_s = plan.ends_at - time.monotonic() - STACKS_BEFORE * plan.timeout_s
    faulthandler.dump_traceback_later(max(left_s, LEAST_S))
    loop_observer.observe(Recorder(RecordWriter(files), plan))
    run(plan.target, Path(plan.directory))
    faulthandler.cancel_dump_traceback_later()
