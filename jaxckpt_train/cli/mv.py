"""`jaxckpt mv`: moves a checkpoint, or a step of a run: a verified copy, then the source goes."""

from __future__ import annotations

import errno
import os

from jaxckpt_train.cli.arguments import BACKEND, Json, Step, absolute, step_number
from jaxckpt_train.cli.cp import Destination, Overwrite, Source, copied
from jaxckpt_train.cli.output import bytes_text, print_json, print_text, told_errors
from jaxckpt_train.errors import StorageError
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.moving.checked_copy import refuse_other_tools
from jaxckpt_train.moving.destination import destination
from jaxckpt_train.moving.source_removal import (
    refuse_to_remove_checkpoint,
    refuse_to_remove_step,
    remove_checkpoint,
    remove_step,
)
from jaxckpt_train.opened import Opened
from jaxckpt_train.steps.owned_run import owned_run
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.local import file_exists


def mv(src: Source, dst: Destination, step: Step = None, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Move a checkpoint, or one step of a run: copy it as `jaxckpt cp --check` does, then remove the source.

    A step must be neither the newest of its run nor pinned. While a live process owns the run, that ends with 4.
    """
    with told_errors(as_json):
        source = open_at(BACKEND, absolute(src), step_number(step))
        final = destination(BACKEND, dst, source)
        refuse_other_tools(source)
        if parse_step_name(os.path.basename(source.path)) is None:
            refuse_to_remove_checkpoint(BACKEND, source.path)
            nbytes = copied(source, final, overwrite, True, as_json).data_bytes
            remove_checkpoint(BACKEND, source.path)
        else:
            nbytes = _move_step(source, final, overwrite, as_json)
        if file_exists(source.path):
            raise StorageError(errno.EBUSY, f"is copied to {final}, but the source was not removed", source.path)
        if as_json:
            told = {"source": source.path, "path": final, "bytes": nbytes, "removed": True}
            print_json({**told, "skipped": source.skipped})
        else:
            print_text(f"{source.path} -> {final}: {bytes_text(nbytes)} moved")


def _move_step(source: Opened, final: str, overwrite: bool, as_json: bool) -> int:
    run, name = os.path.split(source.path)
    with owned_run(BACKEND, run) as owned:
        refuse_to_remove_step(BACKEND, owned, run, name)
        done = copied(source, final, overwrite, True, as_json)
        remove_step(owned, name)
    return done.data_bytes
