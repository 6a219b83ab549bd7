"""A state given as the function that makes it: called on a fresh start, and only traced where a step is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt_train.checkpointables.pytree import PytreeHandler
from jaxckpt_train.checkpointables.registry import handler_of
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.tree.flatten import flatten


def is_maker(value: object) -> bool:
    """Whether a value is a function that makes a state, and not a state that can be called.

    Modules of NNX have a handler of their own, and modules of Equinox are pytrees. Any other callable holds nothing
    that could be saved.
    """
    return callable(value) and isinstance(handler_of(value), PytreeHandler) and jax.tree_util.all_leaves([value])


def made(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each function that makes one replaced with its result."""
    return {name: value() if is_maker(value) else value for name, value in values.items()}


def made_abstractly(values: Mapping[str, Any]) -> dict[str, Any]:
    """As `made`, but no array is computed: each is a `jax.ShapeDtypeStruct`, with its sharding where that is known."""
    return {name: _abstract(value) if is_maker(value) else value for name, value in values.items()}


def refuse_abstract(values: Mapping[str, Any], directory: str) -> None:
    """Raise SettingsError if a loop without a step to restore was given an abstract state."""
    for name, value in values.items():
        tree_of = getattr(handler_of(value), "tree_of", None)
        if tree_of is None or not any(map(_is_abstract, jax.tree.leaves(tree := tree_of(value)))):
            continue
        flat = flatten(tree)
        leaf = next(path for path, leaf in zip(flat.names, flat.leaves, strict=True) if _is_abstract(leaf))
        raise SettingsError(
            f"resume: {name}: expected arrays, as {directory} has no step to restore; found a jax.ShapeDtypeStruct at "
            f"leaf {leaf!r}: give the function that makes the state, resume(make_state, ...), which is called on a "
            "fresh start only"
        )


def _is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _abstract(make: Callable[[], Any]) -> Any:
    seen: list[tuple[Any, Any, list[Any]]] = []

    def trace() -> list[jax.Array]:
        state = make()
        handler = handler_of(state)
        if not isinstance(handler, PytreeHandler):
            seen.append((handler, None, []))
            return []
        leaves, structure = jax.tree.flatten(state)
        seen.append(
            (handler, structure, [None if isinstance(leaf, jax.Array) else _host_form(leaf) for leaf in leaves])
        )
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    traced, shapes = jax.make_jaxpr(trace, return_shape=True)()
    handler, structure, leaves = seen[-1]
    if structure is None:
        of_objects: Callable[[Callable[[], Any]], Any] | None = getattr(handler, "made_abstractly", None)
        return make() if of_objects is None else of_objects(make)
    shardings = _shardings(traced.jaxpr)
    arrays = iter([_with_sharding(*each) for each in zip(shapes, shardings, strict=True)])
    return jax.tree.unflatten(structure, [next(arrays) if leaf is None else leaf for leaf in leaves])


def _host_form(leaf: Any) -> Any:
    """A leaf that is no JAX array: itself, and an array of NumPy without the memory of its values."""
    return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape) if type(leaf) is np.ndarray else leaf


def _shardings(jaxpr: Any) -> Sequence[jax.sharding.Sharding | None]:
    """The shardings of the outputs that a jitted function gives by `out_shardings`, or a `jax.device_put`."""
    made_by = {id(var): (eqn.params, number) for eqn in jaxpr.eqns for number, var in enumerate(eqn.outvars)}

    def of(params: Mapping[str, Any], number: int) -> jax.sharding.Sharding | None:
        given = [params[key][number] for key in ("out_shardings", "devices") if key in params]
        return next((each for each in given if isinstance(each, jax.sharding.Sharding)), None)

    return [of(*made_by.get(id(var), ({}, 0))) for var in jaxpr.outvars]


def _with_sharding(shape: Any, sharding: jax.sharding.Sharding | None) -> Any:
    place = shape.sharding if sharding is None else sharding
    struct: Any = jax.ShapeDtypeStruct
    return struct(shape.shape, shape.dtype, sharding=place, weak_type=shape.weak_type)
