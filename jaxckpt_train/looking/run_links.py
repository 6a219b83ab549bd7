"""The links in a run's directory that stand for steps of it, such as that to the best one."""

from __future__ import annotations

import os

from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.local_names import link_target


def links_to_steps(backend: Backend, directory: str) -> dict[str, str]:
    """The names of links, by the name of the step that each stands for.

    Raises:
        StorageError: the directory cannot be read.
    """
    found = {}
    for entry in backend.list(directory):
        target = link_target(f"{directory}/{entry.name}") if entry.kind == "other" else None
        if target is not None:
            folder, name = os.path.split(os.path.normpath(os.path.join(directory, target)))
            if folder == directory and parse_step_name(name) is not None:
                found[name] = entry.name
    return found
