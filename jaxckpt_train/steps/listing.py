"""What a run directory says of its steps, without a word to other processes; and letting go of those not kept."""

from __future__ import annotations

import functools
from typing import Literal

from jaxckpt_train.checkpoint_metadata import CheckpointMetadata
from jaxckpt_train.steps.followed_run import KnownRun
from jaxckpt_train.steps.policy_arguments import metric_name
from jaxckpt_train.steps.policy_context import CheckpointInfo
from jaxckpt_train.steps.ranking import rank_checkpoints
from jaxckpt_train.steps.refusals import step_not_found
from jaxckpt_train.steps.restored import StepVanishedError
from jaxckpt_train.steps.restoring import describe_listed
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.steps.together import Together
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.value_checks import stated_mode


class StepListing:
    """The committed steps of a run; the part of `StepManager` that saves nothing and restores nothing.

    In a job each process answers by what process 0 has told it last; before the directory is taken, by the disk.
    """

    _backend: Backend
    _run: RunDirectory
    _together: Together

    def __init__(self, directory: str, known: KnownRun) -> None:
        self.directory, self._known = directory, known

    @property
    def steps(self) -> list[int]:
        """The committed steps, lowest first."""
        return sorted(entry.step for entry in self._known.newest())

    @property
    def latest(self) -> int | None:
        """The step that was committed last; after a roll-back, of the new branch. None: there is none."""
        found = self._known.newest()
        return found[-1].step if found else None

    @property
    def damaged(self) -> list[int]:
        """The steps that were set aside as damaged and not saved anew, lowest first; `restore(step=...)` tries one."""
        return sorted({entry.step for entry in self._known.damaged()} - set(self.steps))

    @property
    def infos(self) -> list[CheckpointInfo]:
        """The committed steps as policies see them, lowest first."""
        return sorted((entry.info() for entry in self._known.newest()), key=lambda info: info.step)

    def all_steps(self) -> list[int]:
        """As `steps`."""
        return self.steps

    def latest_step(self) -> int | None:
        """As `latest`."""
        return self.latest

    def is_committed(self, step: int) -> bool:
        """Whether this step is committed, and was not left behind by a roll-back."""
        return self._known.is_committed(step)

    def best(self, metric: str, mode: Literal["min", "max"] | None = None) -> int | None:
        """The step with the best value of a metric; of equal ones the latest; nan is never best. None: no step has it.

        Args:
            metric: its name.
            mode: "min": lower is better; "max": higher is; None: "min", and refused for a metric such as "accuracy".

        Raises:
            SettingsError: `metric` is no name, or `mode` is neither "min" nor "max", or has to be stated.
        """
        name = metric_name("best: metric", metric)
        infos = [entry.info() for entry in self._known.newest()]
        ranked = rank_checkpoints(infos, name, stated_mode("best: mode", mode, name))
        return ranked[0].step if ranked else None

    def path(self, step: int | None = None) -> str:
        """The directory of a step, for `jaxckpt_train.load`, `verify` and whoever copies it; None: of the latest.

        Raises:
            StepNotFoundError: there is no such step, or none at all.
        """
        return f"{self.directory}/{self._known.candidates(step)[0].name}"

    def metadata(self, step: int | None = None, *, progress: Progress | None = None) -> CheckpointMetadata:
        """What a step holds; None: the latest. `progress` is called with 0 in waits; what it raises ends them.

        Raises:
            StepNotFoundError: there is no such step, or none at all.
        """
        describe = functools.partial(describe_listed, self._backend, self.directory, progress=progress)
        if not self._together.leads:
            try:
                return describe(self._together.known.candidates(step))
            except StepVanishedError as gone:
                raise step_not_found(self.directory, step, self._together.known.newest()) from gone
        return self._run.with_entries(step, describe, progress=progress)
