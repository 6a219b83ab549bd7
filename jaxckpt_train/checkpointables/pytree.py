"""The handlers of plain content: pytrees, JSON values, and objects with get_state and set_state."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, Json, Saved, Staged
from jaxckpt_train.checkpointables.iterator_state import own_value, stage_own
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import MismatchError, UnsupportedLeafError


class PytreeHandler:
    """Any pytree; the handler of everything that no other handler takes."""

    kind = "pytree"
    early = False

    def handles(self, value: object) -> bool:
        """Everything."""
        return True

    def stage(self, value: Any) -> Staged:
        """The tree itself."""
        return Staged(tree=value)

    def tree_of(self, target: Any) -> Any:
        """What `restore` loads the leaves of."""
        return target

    def compare(self, target: Any, saved: Saved) -> None:
        """Raise all differences to the target."""
        saved.compare(target)

    def restore(self, target: Any, saved: Saved) -> Any:
        """The stored leaves in the structure of the target."""
        return saved.tree(target)


@dataclasses.dataclass(frozen=True)
class JsonValue:
    """Marks plain data (None, bool, int, float, str, lists, dicts with text keys) that is stored as a JSON file.

    Unlike a pytree it is loaded as it was saved, whatever its structure is by then: use it for configurations and
    notes. As the target of a load give `JsonValue(None)` or nothing. NaN and infinities come back, too.
    """

    value: Json


class JsonHandler:
    """A JsonValue."""

    kind = "json"
    restores = (ORBAX_GRAIN,)  # as it is, where there is no iterator to set
    early = True

    def handles(self, value: object) -> bool:
        """Whether it is marked as JSON."""
        return isinstance(value, JsonValue)

    def stage(self, value: JsonValue) -> Staged:
        """The data; it is encoded before the call to save returns."""
        return Staged(value=value.value)

    def restore(self, target: Any, saved: Saved) -> JsonValue:
        """The data, marked as JSON again."""
        return JsonValue(saved.value())


class GetSetStateHandler:
    """An object with `get_state()` and `set_state(state)`; the state is any pytree, restored without a target.

    In a job of several processes each has its own, as of an iterator: plain data may differ, arrays on devices may not.
    """

    kind = "get_set_state"
    early = True

    def handles(self, value: object) -> bool:
        """Whether it has both methods."""
        return not inspect.isclass(value) and all(callable(getattr(value, m, None)) for m in ("get_state", "set_state"))

    def stage(self, value: Any) -> Staged:
        """What `get_state` returns now."""
        state = value.get_state()
        if current().processes > 1:
            with contextlib.suppress(UnsupportedLeafError):
                return stage_own(state)
        return Staged(tree=state)

    def restore(self, target: Any, saved: Saved) -> Any:
        """The target after `set_state`; without a target the state itself."""
        state = own_value(saved, is_wanted=target is not None) if saved.values else saved.tree(None)
        if target is None:
            return state
        if not self.handles(target):
            raise MismatchError(f"{saved.name!r} was saved from an object with get_state; the target has no set_state")
        target.set_state(state)
        return target
