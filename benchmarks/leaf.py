"""Leaf: one array of a workload, described without any library of arrays."""

from __future__ import annotations

import dataclasses
import math

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}

Axis = str | None


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array.

    Attributes:
        path: keys of the nested dicts that lead to it.
        shape: its shape.
        dtype: a key of `ITEM_BYTES`.
        spec: for each dimension the mesh axis ("x", "y", or both as "x+y") that it is cut over, None: not cut.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    spec: tuple[Axis, ...] = ()

    @property
    def name(self) -> str:
        """The path as one string, the key of a flat dict."""
        return "/".join(self.path)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)
