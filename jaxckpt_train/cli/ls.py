"""`jaxckpt ls`: the steps of a run."""

from __future__ import annotations

import datetime
from typing import Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, Run, absolute
from jaxckpt_train.cli.output import Code, age_text, bytes_text, number_text, print_columns, print_json, told_errors
from jaxckpt_train.errors import NotACheckpointError
from jaxckpt_train.looking.opening import text_of_other
from jaxckpt_train.looking.run_look import StepLook, look_at_run
from jaxckpt_train.steps.refusals import newest_of_orbax
from jaxckpt_train.store.local import is_file


def ls(run: Run, as_json: Json = False) -> None:
    """List the steps of a run: size, age, metrics, and what keeps a step from being restored.

    Ends with 1 if a step that the run goes on from cannot be restored, with 3 if there is none.
    """
    with told_errors(as_json):
        directory = absolute(run)
        looks = look_at_run(BACKEND, directory) if not is_file(directory) else []
        if not looks:
            raise NotACheckpointError(f"{directory}: expected a run, found {_other(directory)}")
        now = datetime.datetime.now(datetime.UTC)
        if as_json:
            print_json({"run": directory, "steps": [_json_of(look) for look in looks]})
        else:
            _print(looks, now)
        if any(look.problem is not None for look in looks if look.is_current or look.entry is None):
            raise typer.Exit(int(Code.WRONG))


def _other(directory: str) -> str:
    """What is there instead, and the command that opens it."""
    found, step = text_of_other(BACKEND, directory), newest_of_orbax(BACKEND, directory)
    which = "" if step is None else f" --step {step}"
    return f"{found}; `jaxckpt show {directory}{which}` tells of it" if found else "no steps in it"


def _json_of(look: StepLook) -> dict[str, Any]:
    entry = look.entry
    return {
        "step": look.step,
        "name": look.name,
        "bytes": look.nbytes,
        "time": entry.time if entry is not None and entry.tells_time else None,
        "metrics": {} if entry is None else dict(entry.metrics or {}),
        "pinned": entry is not None and entry.pinned,
        "temporary": entry is not None and entry.temporary,
        "current": look.is_current,
        "valid": look.problem is None,
        "problem": look.problem,
    }


def _print(looks: list[StepLook], now: datetime.datetime) -> None:
    names = list(dict.fromkeys(name for look in looks if look.entry for name in look.entry.metrics or {}))
    rows = []
    for look in looks:
        entry = look.entry
        metrics = {} if entry is None else entry.metrics or {}
        age = age_text((now - entry.time).total_seconds()) if entry is not None and entry.tells_time else ""
        rows.append(
            [
                str(look.step),
                bytes_text(look.nbytes),
                age,
                *(number_text(metrics.get(name)) for name in names),
                _state(look),
            ]
        )
    print_columns(["step", "size", "age", *names, "state"], rows, [True, True, True, *[True] * len(names), False])


def _state(look: StepLook) -> str:
    words = []
    if look.entry is not None:
        words += ["pinned"] if look.entry.pinned else []
        words += ["temporary"] if look.entry.temporary else []
        words += [] if look.is_current else ["left behind"]
    words.append("ok" if look.problem is None else look.problem)
    return ", ".join(words)
