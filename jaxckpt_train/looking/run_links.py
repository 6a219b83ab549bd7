"""The links in a run's directory that stand for steps of it, such as that to the best one."""

from __future__ import annotations

import os

from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.local_names import link_target, real_path


def links_to_steps(backend: Backend, directory: str) -> dict[str, str]:
    """The names of links, by the name of the step that each stands for, or for something in it.

    Also of one that leads there by other links, or by another name of the run's directory.

    Raises:
        StorageError: the directory cannot be read.
    """
    found: dict[str, str] = {}
    real = real_path(directory)
    for entry in backend.list(directory):
        path = f"{directory}/{entry.name}"
        target = link_target(path) if entry.kind == "other" else None
        if target is not None:
            as_it_says = _step_in(directory, os.path.normpath(os.path.join(directory, target)))
            found |= {name: entry.name for name in (as_it_says, _step_in(real, real_path(path))) if name is not None}
    return found


def _step_in(directory: str, path: str) -> str | None:
    """The step of a run that a path lies in."""
    if not path.startswith(f"{directory}/"):
        return None
    name = path.removeprefix(f"{directory}/").partition("/")[0]
    return name if parse_step_name(name) is not None else None
