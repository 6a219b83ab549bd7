"""The operation that adds a leaf: an array of zeros, of a value, or drawn at random."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.store.dtypes import DTYPES, is_inexact
from jaxckpt_train.store.machine import memory_bytes
from jaxckpt_train.surgery.fitting import held
from jaxckpt_train.surgery.leaves import Leaf, Leaves
from jaxckpt_train.surgery.names import wildcards
from jaxckpt_train.surgery.operation import Change, Operation, check_dtype, whole_number
from jaxckpt_train.surgery.views import Constant, Filled, View
from jaxckpt_train.tree.leaf_records import ArrayLeaf

Make = Callable[[tuple[int, ...]], np.ndarray]
_NORMAL_BYTES = 8  # a number of these before it is converted
_NAMED = ("zeros", "ones", "normal")


@dataclasses.dataclass(frozen=True)
class Add(Operation):
    """Add an array, such as an adapter's that the checkpoint lacks.

    Args:
        leaf: its path.
        shape: of it.
        dtype: the name of one.
        init: "zeros", "ones", a number, "normal" (of `stddev`), or in Python a function of the shape.
        stddev: of "normal".
        seed: of "normal": the same values for the same leaf path and seed, on every machine.
    """

    name = "add"
    leaf: str
    shape: Sequence[int]
    dtype: str = "float32"
    init: str | float | Make = "zeros"
    stddev: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_patterns("leaf")
        if wildcards(self.leaf):
            raise SettingsError(f"add: leaf: expected one path without wildcards, found {self.leaf!r}")
        object.__setattr__(self, "shape", tuple(whole_number("add: shape", size, least=0) for size in self.shape))
        check_dtype("add: dtype", self.dtype)
        is_number = isinstance(self.init, int | float) and not isinstance(self.init, bool)
        if not (is_number or callable(self.init) or self.init in _NAMED):
            raise SettingsError(f"add: init: expected {', '.join(_NAMED)}, a number or a function, found {self.init!r}")
        whole_number("add: seed", self.seed, least=0)
        stddev: Any = self.stddev
        is_number = isinstance(stddev, numbers.Real) and not isinstance(stddev, bool)
        if not (is_number and 0 <= stddev < math.inf):
            raise SettingsError(f"add: stddev: expected a number from 0, found {self.stddev!r}")
        if self.init == "normal" and not is_inexact(DTYPES[self.dtype]):
            raise SettingsError(f"add: dtype: expected one of floats for normal, found {self.dtype!r}")

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        if self.leaf in leaves:
            raise MismatchError(f"{subject}: leaf {self.leaf!r} is there already; drop it first, or leave this out")
        leaves[self.leaf] = Leaf(ArrayLeaf(), self._view(subject))
        return [("nothing", f"{self.leaf} {leaves[self.leaf].text()}")]

    def _view(self, subject: str) -> View:
        dtype, whole = DTYPES[self.dtype], f"{subject}: leaf {self.leaf!r}"
        if callable(self.init) or self.init == "normal":
            size = math.prod(self.shape) * (dtype.itemsize if callable(self.init) else _NORMAL_BYTES)
            if size > memory_bytes():
                raise MismatchError(
                    f"{whole}: {list(self.shape)} is made in memory as a whole, {size:,} bytes, of which this machine "
                    f"has {memory_bytes():,}; add it with zeros, or in parts"
                )
            return Filled(self.shape, dtype, self._make, whole)
        given = {"zeros": 0.0, "ones": 1.0}[self.init] if isinstance(self.init, str) else self.init
        value = held(given, dtype)
        if value is None:
            raise MismatchError(f"{whole} of {self.dtype} cannot hold the value {given!r:.99}")
        return Constant(self.shape, value)

    def _is_complex(self) -> bool:
        return np.issubdtype(DTYPES[self.dtype], np.complexfloating)

    def _make(self, shape: tuple[int, ...]) -> np.ndarray:
        if callable(self.init):
            made = np.asarray(self.init(shape))
            if made.shape != shape:
                raise MismatchError(f"add {self.leaf!r}: init gave shape {list(made.shape)}, expected {list(shape)}")
            if np.iscomplexobj(made) and not self._is_complex():
                raise MismatchError(f"add {self.leaf!r}: init gave {made.dtype}, which {self.dtype} cannot hold")
            return made
        of_leaf = int.from_bytes(hashlib.sha256(self.leaf.encode()).digest()[:8], "little")
        return np.random.Generator(np.random.Philox([self.seed, of_leaf])).standard_normal(shape) * self.stddev
