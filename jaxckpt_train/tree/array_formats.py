"""The order in which a device stores the dimensions of an array, where a target has or asks for another than usual."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import layout

from jaxckpt_train.tree.leaf_values import is_key_array

_HAS_FORMATS = hasattr(layout, "Format")  # since JAX 0.7


def is_format(value: object) -> bool:
    """Whether a value is a sharding with a layout."""
    return _HAS_FORMATS and isinstance(value, layout.Format)


def with_layout(sharding: Any, asked: object) -> Any:
    """The sharding, as a format if a layout was asked for."""
    return layout.Format(asked, sharding) if _HAS_FORMATS and isinstance(asked, layout.Layout) else sharding


def in_format_of(target: Any, value: Any) -> Any:
    """A restored array in the layout of its target: a function that was compiled for that layout takes no other.

    A load puts arrays in the usual layout of their device, which is nearly always that of the target too.
    """
    if value is target or not isinstance(value, jax.Array) or value.ndim < 2 or is_key_array(value):
        return value
    if not value.sharding.addressable_devices:  # all of it is on another process, and JAX knows no layout of it
        return value
    wanted = _layout_of(target)
    if wanted is None or _order(wanted) == _order(_layout_of(value)):
        return value
    return jax.device_put(value, layout.Format(wanted, value.sharding))


def _layout_of(leaf: Any) -> Any:
    """The layout of an array, or that which an abstract one asks for; None: none, or a JAX before 0.7."""
    return getattr(getattr(leaf, "format", None), "layout", None)


def _order(found: Any) -> Any:
    return found and (found.major_to_minor, found.tiling or ())
