"""Runs one measurement in a fresh Python process: a function by name, JSON in and JSON out."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900.0
SHOWN_CHARACTERS = 4000


def run_fresh(
    function: str,
    arguments: Mapping[str, Any],
    *,
    devices: int = 1,
    platform: str | None = "cpu",
    cache: Path | None = None,
    under: Sequence[str] = (),
    python: Path | str = sys.executable,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Call a function in a process of its own, and return what it returned.

    Args:
        function: as `module:name`; it takes and returns what JSON can hold.
        arguments: passed by keyword.
        devices: how many CPU devices JAX shows there.
        platform: the only one that JAX uses there; None: JAX chooses.
        cache: where processes share what they have compiled; None: they do not.
        under: a command to put before, such as `taskset -c 0` or `flock FILE`.
        python: the interpreter of the process.
        timeout_s: the process is killed after this long.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {} if platform is None else {"JAX_PLATFORMS": platform}
    if cache is not None:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        answer = Path(folder, "answer.json")
        command = [
            *under,
            str(python),
            "-m",
            "benchmarks.cost_process",
            function,
            str(answer),
            json.dumps(arguments),
        ]
        done = subprocess.run(
            command, cwd=REPO_ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0 or not answer.exists():
            output = (done.stdout + done.stderr)[-SHOWN_CHARACTERS:]
            raise RuntimeError(f"{function}({dict(arguments)}) left with {done.returncode}:\n{output}")
        return json.loads(answer.read_text(encoding="utf-8"))


def _main() -> None:
    function, answer, arguments = sys.argv[1:]
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    _main()
