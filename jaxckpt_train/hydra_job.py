"""What the running Hydra job says of directories. Hydra is recognised where it runs already, and never imported."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from jaxckpt_train.value_checks import absolute_path

_ROOT = "checkpoint"
_LONGEST_JOB_NAME = 100


def resolve_directory(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a run directory.

    Args:
        directory: `~` is the user's home; a relative path starts where the command was given: under Hydra in its
            original working directory, whatever `hydra.job.chdir` says, else in the working directory.

    Raises:
        SettingsError: it is no path, or a URL.
    """
    return Path(absolute_path(f"{_ROOT}.directory", directory, _hydra_value("runtime", "cwd") or ""))


def run_directory(directory: str | os.PathLike[str]) -> Path:
    """As `resolve_directory`; in a Hydra multirun it ends with `job_name()`: no job must continue another one."""
    return resolve_directory(directory) / job_name()


def hydra_directory_problem(directory: str | os.PathLike[str]) -> str | None:
    """What is wrong with keeping checkpoints there in the running Hydra job; None: nothing, or no Hydra job runs.

    Args:
        directory: as given to `resolve_directory`.
    """
    output = _hydra_value("runtime", "output_dir")
    path = resolve_directory(directory)
    kind = "sweep" if is_multirun() else "run"
    if output is None or not path.is_relative_to(output) or not _has_time_in_it(kind):
        return None
    return (
        f"{_ROOT}.directory: {path} lies in the output folder of this Hydra run, which is a new one in every run: the "
        f"same command will not find these checkpoints and will start anew; set {_ROOT}.directory to a path outside of "
        f"{output}, or hydra.{kind}.dir to one without a time in it"
    )


def is_multirun() -> bool:
    """Whether this process runs a job of a Hydra multirun (`--multirun`)."""
    return getattr(_hydra_value("mode"), "name", None) == "MULTIRUN"


def job_name() -> str:
    """In a Hydra multirun, a directory name made from the job's overrides; empty elsewhere."""
    if not is_multirun():
        return ""
    overrides = _hydra_value("overrides", "task") or ()
    whole = ",".join(sorted(one for one in overrides if one.partition("=")[0].lstrip("+~") != f"{_ROOT}.directory"))
    plain = re.sub(r"[^A-Za-z0-9._=,+-]", "_", whole)
    if plain == whole and len(plain) <= _LONGEST_JOB_NAME:
        return plain
    return f"{plain[:_LONGEST_JOB_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _has_time_in_it(kind: str) -> bool:
    """Whether the template of the output folder, hydra.run.dir or hydra.sweep.dir, makes a new one in every run."""
    omegaconf: Any = sys.modules["omegaconf"]
    return "${now" in str(omegaconf.OmegaConf.to_container(_hydra_value(kind), resolve=False))


def _hydra_value(*path: str) -> Any:
    """A value of the running Hydra job's own configuration; None: it is not set, or no Hydra job runs."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    node = module.HydraConfig.get()
    for name in path:
        node = None if node is None else node.get(name)
    return node
