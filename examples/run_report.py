"""A training that is preempted, killed, and finished, and an HTML report about the run.

`train_digits.py` runs in its own directory, always by the same command: it gets a SIGTERM, later a SIGKILL, and then
finishes. A step is pinned in between. `jaxckpt report` makes the page.

    python examples/run_report.py [--steps 9000] [--directory DIRECTORY] [--output report.html]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jaxckpt_train as jct

TRAIN = Path(__file__).parent / "train_digits.py"
LIMIT_S = 300.0
OPTIONS = (
    "losses=losses.txt",
    "hidden=512",
    "checkpoint.directory=checkpoints",
    "checkpoint.save_interval_steps=300",
    "checkpoint.keep_latest=4",
    "checkpoint.keep_every_steps=1500",
)


def start(directory: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start it, with its output in log.txt."""
    with open(directory / "log.txt", "ab") as log:
        command = [sys.executable, str(TRAIN), f"steps={steps}", *OPTIONS]
        return subprocess.Popen(command, cwd=directory, stdout=log, stderr=subprocess.STDOUT)


def wait_for_update(process: subprocess.Popen[bytes], directory: Path, number: int) -> None:
    """Wait until its losses show this many updates."""
    losses, end = directory / "losses.txt", time.monotonic() + LIMIT_S
    while not losses.exists() or losses.read_bytes().count(b"\n") < number:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"update {number} was not reached; {directory / 'log.txt'} says why")
        time.sleep(0.05)


def end_after(directory: Path, steps: int, number: int, how: signal.Signals) -> None:
    """Start it, and send it a signal after a number of updates."""
    process = start(directory, steps)
    try:
        wait_for_update(process, directory, number)
        process.send_signal(how)
        print(f"{how.name} after update {number}: it left with {process.wait(LIMIT_S)}")
    finally:
        process.kill()
        process.wait()


def make_run(directory: Path, steps: int) -> Path:
    """Train in a directory, and return the directory of the checkpoints."""
    checkpoints = directory / "checkpoints"
    end_after(directory, steps, steps // 3, signal.SIGTERM)
    with jct.StepManager(checkpoints) as manager:
        manager.pin(manager.latest)
    end_after(directory, steps, steps * 2 // 3, signal.SIGKILL)
    process = start(directory, steps)
    if process.wait(LIMIT_S) != 0:
        raise SystemExit(f"the training has failed; {directory / 'log.txt'} says why")
    return checkpoints


def main() -> int:
    """Train, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9000, help="updates of the training")
    parser.add_argument("--directory", type=Path, help="a new one, which is kept; none: a temporary one")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (arguments.directory or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=arguments.directory is None)
        run = make_run(directory, arguments.steps)
        command = [sys.executable, "-m", "jaxckpt_train.cli", "report", str(run)]
        return subprocess.run([*command, "-o", str(arguments.output)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
