"""A worker: the process in which one subject has its turns, with commands as JSON lines.

`python -m benchmarks.worker --subject NAME` (and as one of a job: `--job` with JSON for `jax.distributed.initialize`),
then on its standard input one object a line: first
`{"workload": {...}}`, then `{"do": "save", "path": ..., "seed": [...]}` and `{"do": "load", "path": ..., "seed": [...],
"target": ...}`. Each is answered by one line, `{"ok": ...}` or `{"error": ..., "traceback": ...}`. It leaves at the end
of its input. What a library prints goes to standard error, never between the answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.company import Job, SingleProcess
from benchmarks.machine import version
from benchmarks.registry import make_turns
from benchmarks.turns import Turns
from benchmarks.workloads import Workload

Request = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer requests until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description="One subject, driven by commands.")
    parser.add_argument("--subject", required=True, help="a name of the registry, or package.module:Class")
    parser.add_argument("--job", type=json.loads, help="one of a job: JSON for jax.distributed.initialize")
    options = parser.parse_args(arguments)
    turns: Turns | None = None
    answer: dict[str, Any]
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for request in map(json.loads, sys.stdin):
            try:
                if turns is None:
                    company = Job(options.job) if options.job else SingleProcess()
                    turns = make_turns(options.subject, Workload.from_json(request["workload"]), company)
                    answer = {"ok": _versions(turns)}
                else:
                    answer = {"ok": _done(turns, request)}
            except Exception as error:  # noqa: BLE001 - an error of a library is reported with its traceback
                answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        if turns:
            turns.close()


def _done(turns: Turns, request: Request) -> Any:
    path, seed = Path(request["path"]), tuple(request["seed"])
    if request["do"] == "save":
        return dataclasses.asdict(turns.save(path, seed))
    return [dataclasses.asdict(sample) for sample in turns.load(path, seed, request["target"])]


def _versions(turns: Turns) -> dict[str, str | None]:
    return {"python": platform.python_version()} | {name: version(name) for name in turns.packages}


if __name__ == "__main__":
    main()
