"""How a loop gets its state: from the newest step of its run, from elsewhere, or as it is."""

from __future__ import annotations

import logging
from typing import Any, Literal

from jaxckpt_train import hydra_job
from jaxckpt_train.checkpoint import load
from jaxckpt_train.checkpointables.fingerprint import with_fingerprint
from jaxckpt_train.checkpointables.makers import made, made_abstractly, refuse_abstract
from jaxckpt_train.initial_state import path_and_options
from jaxckpt_train.progress import progress_line, wants_progress
from jaxckpt_train.steps.data_mismatch import OnMismatch, restore_values
from jaxckpt_train.steps.departure import Departure
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.restoring import size_if_readable

_log = logging.getLogger("jaxckpt_train")


def initialise(manager: StepManager, values: dict[str, Any], init_from: Any, departure: Departure) -> dict[str, Any]:
    """What a fresh run begins with: functions that make a value are called; `init_from` gives the state, if it is set.

    Raises:
        CorruptCheckpointError: there are steps, and none is whole.
        SettingsError: there are steps of another tool, or checkpoints of Flax and no `init_from`; or an abstract leaf.
        MismatchError: what is loaded does not fit the state.
    """
    heeded = departure.heeded(None)
    manager.check_fresh(heeded, beside_flax=init_from is not None)
    if init_from is not None:
        given, options = path_and_options(init_from)
        path, makes_some = hydra_job.resolve_directory(given), {"only", "missing"} & options.keys()
        like = (made if makes_some else made_abstractly)({"state": values["state"]})["state"]
        values["state"] = manager.all_do(
            "loading", lambda: load(path, like, donatable=True, progress=heeded, **options)
        )
        _log.info("initialised the state from %s", given)
    values = made(values)
    refuse_abstract(values, manager.directory)
    return values


def restore(
    manager: StepManager,
    values: dict[str, Any],
    *,
    on_mismatch: OnMismatch,
    fingerprint: str | None,
    progress: bool | Literal["auto"],
    departure: Departure,
) -> dict[str, Any]:
    """What the newest step of the run holds that is whole; `manager.restored_step` tells which one that is.

    Raises:
        MismatchError: the saved state does not fit; no array was read.
        CorruptCheckpointError: no step is whole.
    """
    shown = wants_progress(progress)
    total = size_if_readable(lambda: manager.metadata(progress=departure.heeded(None))) if shown else None
    with with_fingerprint(fingerprint), progress_line("restoring", total, shown) as advance:
        values = restore_values(manager, made_abstractly(values), on_mismatch, departure.heeded(advance))
    _log.info("resumed from step %s of %s", manager.restored_step, manager.directory)
    return values
