"""The variables of a Keras model as a checkpointable: taken when they are saved, and restored in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxckpt_train.checkpointables.contract import Saved, Staged
from jaxckpt_train.checkpointables.registry import register_handler
from jaxckpt_train.errors import MismatchError

GROUPS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


class KerasState:
    """The variables of a compiled and built model: weights, seeds, optimizer, metrics.

    Each group is a list in the model's own order: names of variables that Keras makes up depend on what else a process
    has made before.

    Args:
        model: of Keras, on its JAX backend.

    Attributes:
        metrics: values of the metrics to save in place of the current ones, which an evaluation uses for itself; None:
            the current ones.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.metrics: Sequence[Any] | None = None
        self._restored: dict[str, list[Any]] | None = None

    def variables(self) -> dict[str, list[Any]]:
        """The variables of each group. While a model is being fitted its trainer has the values, which are put back."""
        self.model.jax_state_sync()
        optimizer = self.model.optimizer
        groups = {name: list(getattr(self.model, name)) for name in GROUPS if name != "optimizer_variables"}
        return groups | {"optimizer_variables": [] if optimizer is None else list(optimizer.variables)}

    def values(self) -> dict[str, list[Any]]:
        """Their values."""
        values = {name: [variable.value for variable in group] for name, group in self.variables().items()}
        return values if self.metrics is None else values | {"metrics_variables": list(self.metrics)}

    def take_over(self, values: dict[str, list[Any]]) -> None:
        """Give the variables these values."""
        for name, group in self.variables().items():
            for variable, value in zip(group, values[name], strict=True):
                variable.assign(value)

    def restored(self, values: dict[str, list[Any]]) -> None:
        """Give the variables what was restored, and keep it for `again`."""
        self.take_over(values)
        self._restored = values

    def again(self) -> None:
        """Give the variables once more what was restored, if it was, as Keras and others have touched them since."""
        if self._restored is not None:
            self.take_over(self._restored)
        self.forget()

    def forget(self) -> None:
        """Keep nothing of what was restored."""
        self._restored = None


class KerasHandler:
    """A KerasState. A checkpoint of one is a plain pytree, which loads without Keras."""

    kind = "pytree"
    early = False

    def stage(self, value: KerasState) -> Staged:
        """The values as they are now."""
        return Staged(tree=value.values())

    def compare(self, target: KerasState, saved: Saved) -> None:
        """Raise all differences to the model, with the names of its variables.

        Raises:
            MismatchError: there are some.
        """
        try:
            saved.compare(_abstract(target))
        except MismatchError as error:
            names = _named(target, error.differences)
            raise MismatchError(f"{error}{names}", error.differences) from error

    def restore(self, target: KerasState, saved: Saved) -> KerasState:
        """The target, its model's variables set to what was saved."""
        target.restored(saved.tree(_abstract(target)))
        return target


def _abstract(state: KerasState) -> dict[str, list[Any]]:
    """What the variables want: arrays where they are."""
    struct: Any = jax.ShapeDtypeStruct
    return {
        name: [struct(each.shape, each.dtype, sharding=each.value.sharding) for each in group]
        for name, group in state.variables().items()
    }


def _named(state: KerasState, differences: Sequence[str]) -> str:
    """The names in the model of those leaves that differ."""
    paths = {f"{name}/{i}": each.path for name, group in state.variables().items() for i, each in enumerate(group)}
    found = [f"{leaf} is {path}" for leaf, path in paths.items() if any(f"'{leaf}'" in line for line in differences)]
    return f"\nIn the model: {'; '.join(found)}" if found else ""


register_handler(KerasState, KerasHandler())
