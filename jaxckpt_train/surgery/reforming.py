"""Operations on each array by itself: its axes, shape, dtype and size."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.surgery.fitting import held
from jaxckpt_train.surgery.leaves import Leaves, array_of
from jaxckpt_train.surgery.names import matches
from jaxckpt_train.surgery.operation import Change, Operation, check_dtype, whole_number
from jaxckpt_train.surgery.views import Cast as CastView
from jaxckpt_train.surgery.views import Padded, Reshaped, Sliced, Transposed, View


class _EachArray(Operation):
    """A change of each array by itself."""

    leaves: str

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        changes = []
        for name in matches(self.leaves, leaves, subject):
            leaf = leaves[name]
            leaves[name] = leaf.with_view(self._changed(array_of(leaf, name, subject), name, subject))
            changes.append((f"{name} {leaf.text()}", leaves[name].text()))
        return changes

    @abc.abstractmethod
    def _changed(self, view: View, name: str, subject: str) -> View:
        """The array instead of one."""


@dataclasses.dataclass(frozen=True)
class Transpose(_EachArray):
    """Put axes in another order.

    Args:
        leaves: a path or pattern.
        axes: the axis of the old array for each of the new one; None: the other way round.
    """

    name = "transpose"
    leaves: str
    axes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        if self.axes is not None:
            axes = tuple(whole_number("transpose: axes", axis, least=0) for axis in self.axes)
            if len(set(axes)) != len(axes):
                raise SettingsError(f"transpose: axes: expected each axis once, found {list(axes)}")
            object.__setattr__(self, "axes", axes)

    def _changed(self, view: View, name: str, subject: str) -> View:
        axes = tuple(reversed(range(len(view.shape)))) if self.axes is None else self.axes
        if sorted(axes) != list(range(len(view.shape))):
            last = len(view.shape) - 1
            wanted = f"each of 0 to {last} once" if last > 0 else "0 alone" if last == 0 else "none"
            raise MismatchError(
                f"{subject}: leaf {name!r} has {last + 1} axes: axes: expected {wanted}, found {list(axes)}"
            )
        return Transposed(view, axes)


@dataclasses.dataclass(frozen=True)
class Reshape(_EachArray):
    """Give arrays another shape, with the same elements in row-major order.

    Args:
        leaves: a path or pattern.
        shape: -1 at most once, for what is left.
    """

    name = "reshape"
    leaves: str
    shape: Sequence[int]

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        shape = tuple(whole_number("reshape: shape", size, least=-1) for size in self.shape)
        if shape.count(-1) > 1:
            raise SettingsError(f"reshape: shape: expected -1 once at most, found {list(shape)}")
        object.__setattr__(self, "shape", shape)

    def _changed(self, view: View, name: str, subject: str) -> View:
        count, known = math.prod(view.shape), math.prod(size for size in self.shape if size != -1)
        left = count // known if known else 0
        shape = [left if size == -1 else size for size in self.shape]
        if math.prod(shape) != count:
            raise MismatchError(f"{subject}: leaf {name!r} of shape {list(view.shape)} has no shape {list(self.shape)}")
        return Reshaped(view, shape)


@dataclasses.dataclass(frozen=True)
class Cast(_EachArray):
    """Convert arrays to another dtype; floats are rounded, and may become infinite.

    Integers that do not fit are an error of what reads them.

    Args:
        leaves: a path or pattern.
        dtype: its name, such as "bfloat16".
    """

    name = "cast"
    leaves: str
    dtype: str

    def __post_init__(self) -> None:
        self._check_patterns("leaves")
        check_dtype("cast: dtype", self.dtype)

    def _changed(self, view: View, name: str, subject: str) -> View:
        new = DTYPES[self.dtype]
        if _sort(view.dtype) > _sort(new):
            raise MismatchError(
                f"{subject}: leaf {name!r} of {view.dtype.name} does not become {new.name}: that loses data"
            )
        return CastView(view, new, f"{subject}: leaf {name!r} of {view.dtype.name}")


def _sort(dtype: np.dtype) -> int:
    """Bool, integers, floats and complex numbers, in this order."""
    if "complex" in dtype.name:
        return 3
    return 2 if "float" in dtype.name else 0 if dtype.name == "bool" else 1


class _ToShape(_EachArray):
    """A change of sizes; None in a shape: that one stays."""

    shape: Sequence[int | None]

    def _check_shape(self) -> None:
        self._check_patterns("leaves")
        shape = tuple(
            None if size is None else whole_number(f"{self.name}: shape", size, least=0) for size in self.shape
        )
        object.__setattr__(self, "shape", shape)

    def _new_shape(self, view: View, name: str, subject: str, *, larger: bool) -> tuple[int, ...]:
        if len(self.shape) != len(view.shape):
            raise MismatchError(f"{subject}: leaf {name!r} has {len(view.shape)} axes, expected {len(self.shape)}")
        shape = tuple(old if size is None else size for old, size in zip(view.shape, self.shape, strict=True))
        if any((new < old) if larger else (new > old) for old, new in zip(view.shape, shape, strict=True)):
            raise MismatchError(
                f"{subject}: leaf {name!r} of shape {list(view.shape)}, expected one that is not "
                f"{'larger' if larger else 'smaller'} than {list(shape)}"
            )
        return shape


@dataclasses.dataclass(frozen=True)
class Pad(_ToShape):
    """Make arrays larger at their ends, such as the vocabulary of an embedding.

    Args:
        leaves: a path or pattern.
        shape: of what comes out; None for a size that stays.
        value: of the new elements.
    """

    name = "pad"
    leaves: str
    shape: Sequence[int | None]
    value: float = 0.0

    def __post_init__(self) -> None:
        self._check_shape()
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise SettingsError(f"pad: value: expected a number, found {self.value!r}")

    def _changed(self, view: View, name: str, subject: str) -> View:
        value = held(self.value, view.dtype)
        if value is None:
            raise MismatchError(
                f"{subject}: leaf {name!r} of {view.dtype.name} cannot hold the value {self.value!r:.99}"
            )
        return Padded(view, self._new_shape(view, name, subject, larger=True), value)


@dataclasses.dataclass(frozen=True)
class Truncate(_ToShape):
    """Cut arrays off at their ends.

    Args:
        leaves: a path or pattern.
        shape: of what stays; None for a size that stays.
    """

    name = "truncate"
    leaves: str
    shape: Sequence[int | None]

    def __post_init__(self) -> None:
        self._check_shape()

    def _changed(self, view: View, name: str, subject: str) -> View:
        return Sliced(view, full_box(self._new_shape(view, name, subject, larger=False)))
