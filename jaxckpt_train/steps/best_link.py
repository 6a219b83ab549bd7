"""A link in the run's directory that stands for its best step, for whoever exports that."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Sequence

from jaxckpt_train.errors import SettingsError, StorageError
from jaxckpt_train.steps.entry import Entry
from jaxckpt_train.steps.policy_arguments import metric_name
from jaxckpt_train.steps.ranking import rank_checkpoints
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend, Linking
from jaxckpt_train.value_checks import Mode, stated_mode

_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class BestLink:
    """What the link stands for.

    Args:
        metric: the metric that says which step is better.
        mode: "min": lower is better; "max": higher is better; None: "min", and refused for a metric such as "accuracy".
        name: of the link, in the run's directory.

    Raises:
        SettingsError: an argument is wrong, or the name is one that something else has, or may have.
    """

    metric: str
    mode: Mode | None = None
    name: str = "best"

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", metric_name("BestLink.metric", self.metric))
        object.__setattr__(self, "mode", stated_mode("BestLink.mode", self.mode, self.metric))
        name = self.name
        is_plain = isinstance(name, str) and name.isidentifier() and name.isascii()
        if not is_plain or parse_step_name(name) is not None:
            raise SettingsError(f'BestLink.name: expected a plain name such as "best", found {name!r}')


class LinkToBest:
    """Keeps the link up to date, for the owner of the run. A disk that refuses it, or has none, is told once.

    Args:
        backend, directory: where the run is.
        link: what it stands for; None: there is none.
    """

    def __init__(self, backend: Backend | Linking, directory: str, link: BestLink | None) -> None:
        self._backend, self._directory, self._link = backend, directory, link
        self._guard = threading.Lock()
        self._begun, self._newest = itertools.count(1), 0
        self._target: str | None = None
        self._is_known = self._is_told = False

    def update(self, newest: Callable[[], Sequence[Entry]]) -> None:
        """Have it stand for the best of the steps that there are; where none has the metric, there is no link."""
        if self._link is None:
            return
        number = next(self._begun)
        entries = newest()
        ranked = rank_checkpoints([entry.info() for entry in entries], self._link.metric, self._link.mode or "min")
        target = next((entry.name for entry in entries if ranked and entry.step == ranked[0].step), None)
        with self._guard:
            if number < self._newest:  # another thread has looked later, and was faster
                return
            self._newest = number
            if self._is_known and target == self._target:
                return
            try:
                self._point(target)
            except StorageError as error:
                self._is_known = False
                self._tell(str(error))
            else:
                self._target, self._is_known = target, True

    def _point(self, target: str | None) -> None:
        assert self._link is not None
        if isinstance(self._backend, Linking):
            self._backend.point(f"{self._directory}/{self._link.name}", target)
        else:
            self._tell(f"{self._directory}: this storage has no links")

    def _tell(self, problem: str) -> None:
        level = logging.INFO if self._is_told else logging.WARNING
        self._is_told = True
        _log.log(level, "no link to the best step: %s", problem)
