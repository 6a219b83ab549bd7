"""The operation that adds a leaf: an array of zeros, of a value, or drawn at random."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxckpt_train.errors import MismatchError, SettingsError
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.surgery.leaves import Leaf, Leaves
from jaxckpt_train.surgery.names import wildcards
from jaxckpt_train.surgery.operation import Change, Operation, check_dtype, whole_number
from jaxckpt_train.surgery.views import Filled
from jaxckpt_train.tree.leaf_records import ArrayLeaf

Make = Callable[[tuple[int, ...]], np.ndarray]
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

    def apply(self, leaves: Leaves, subject: str) -> list[Change]:
        """As the base class says."""
        if self.leaf in leaves:
            raise MismatchError(f"{subject}: leaf {self.leaf!r} is there already; drop it first, or leave this out")
        leaves[self.leaf] = Leaf(ArrayLeaf(), Filled(self.shape, DTYPES[self.dtype], self._make))
        return [("nothing", f"{self.leaf} {leaves[self.leaf].text()}")]

    def _make(self, shape: tuple[int, ...]) -> np.ndarray:
        if callable(self.init):
            made = np.asarray(self.init(shape))
            if made.shape != shape:
                raise MismatchError(f"add {self.leaf!r}: init gave shape {list(made.shape)}, expected {list(shape)}")
            return made
        if self.init == "normal":
            of_leaf = int.from_bytes(hashlib.sha256(self.leaf.encode()).digest()[:8], "little")
            return np.random.Generator(np.random.Philox([self.seed, of_leaf])).standard_normal(shape) * self.stddev
        value = {"zeros": 0.0, "ones": 1.0}.get(str(self.init), self.init)
        return np.full(shape, value)
