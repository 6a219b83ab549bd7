"""A state given as the function that makes it: called on a fresh start, and only traced for a restore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt_train.checkpointables.handlers import PytreeHandler, handler_of
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.pytree.copies import is_traced
from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.target import is_format, with_layout

_log = logging.getLogger("jaxckpt_train")
_NOTABLE_BYTES = 1 << 20


def is_maker(value: object) -> bool:
    """Return whether a value is a function that makes a state, and not a module of NNX or Equinox, which is a state."""
    return callable(value) and isinstance(handler_of(value), PytreeHandler) and jax.tree_util.all_leaves([value])


def make_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Call each function that makes a value, and return the values."""
    return {name: value() if is_maker(value) else value for name, value in values.items()}


def trace_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `make_values` returns, with a `jax.ShapeDtypeStruct` and its known sharding for each array."""
    return {name: _abstract(value) if is_maker(value) else value for name, value in values.items()}


def refuse_abstract_values(values: Mapping[str, Any], directory: str) -> None:
    """Raise SettingsError if a loop without a step to restore passed an abstract state."""
    for name, value in values.items():
        tree_of = getattr(handler_of(value), "tree_of", None)
        if tree_of is None or not any(map(_is_abstract, jax.tree.leaves(tree := tree_of(value)))):
            continue
        flat = flatten(tree)
        leaf = next(path for path, leaf in zip(flat.names, flat.leaves, strict=True) if _is_abstract(leaf))
        raise SettingsError(
            f"resume: {name}: expected arrays, because {directory} has no step to restore, found a "
            f"jax.ShapeDtypeStruct at leaf {leaf!r}; pass the function that makes the state, resume(make_state, ...), "
            "which is called on a fresh start only"
        )


def _is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _abstract(make: Callable[[], Any]) -> Any:
    try:
        return _traced(make)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        _log.warning(
            "resume: the function that makes the state cannot be traced, because it needs the values of some arrays. "
            "It is called instead, which computes all of its arrays. Compute the needed values outside of it. %s",
            str(error).partition("\n")[0],
        )
    state = make()
    return jax.tree.map(_form, state) if isinstance(handler_of(state), PytreeHandler) else state


def _traced(make: Callable[[], Any]) -> Any:
    seen: list[tuple[Any, Any, list[Any]]] = []

    def trace() -> list[jax.Array]:
        state = make()
        handler = handler_of(state)
        if not isinstance(handler, PytreeHandler):
            seen.append((handler, None, []))
            return []
        leaves, structure = jax.tree.flatten(state)
        forms = [None if is_traced(leaf) else _form(leaf) for leaf in leaves]
        seen.append((handler, structure, forms))
        return [leaf for leaf, form in zip(leaves, forms, strict=True) if form is None]

    traced, shapes = jax.make_jaxpr(trace, return_shape=True)()
    handler, structure, leaves = seen[-1]
    if structure is None:
        of_objects: Callable[[Callable[[], Any]], Any] | None = getattr(handler, "trace", None)
        return make() if of_objects is None else of_objects(make)
    found = zip(shapes, _shardings(traced.jaxpr), strict=True)
    arrays = iter([_struct(shape, shape.sharding if known is None else known) for shape, known in found])
    tree = jax.tree.unflatten(structure, [next(arrays) if leaf is None else leaf for leaf in leaves])
    _warn_of_unknown_shardings(tree)
    return tree


def _warn_of_unknown_shardings(tree: Any) -> None:
    """Warn if leaves go to the default device although other leaves of the state are on several devices."""
    structs = [leaf for leaf in jax.tree.leaves(tree) if _is_abstract(leaf)]
    unknown = [leaf for leaf in structs if leaf.sharding is None]
    are_spread = any(leaf.sharding is not None and leaf.sharding.num_devices > 1 for leaf in structs)
    if not are_spread or sum(map(_bytes, unknown)) < _NOTABLE_BYTES:
        return
    flat, largest = flatten(tree), max(unknown, key=_bytes)
    name = next(name for name, leaf in zip(flat.names, flat.leaves, strict=True) if leaf is largest)
    _log.warning(
        "resume: leaf %r is restored to the default device (%d bytes in %d such leaves), while other leaves of the "
        "state are on several devices. Tracing the function that makes the state does not show the leaf's sharding; "
        "specify it by jax.jit(make_state, out_shardings=...)",
        name,
        sum(map(_bytes, unknown)),
        len(unknown),
    )


def _bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)


def _form(leaf: Any) -> Any:
    """Return a computed leaf, without its values if it is an array."""
    if type(leaf) is np.ndarray:
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    if not isinstance(leaf, jax.Array):
        return leaf
    return _struct(leaf, leaf.sharding if leaf.committed else None)


def _struct(like: Any, sharding: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(like.shape, like.dtype, sharding=sharding, weak_type=getattr(like, "weak_type", False))


def _shardings(jaxpr: Any) -> Sequence[Any]:
    """Return the shardings of the outputs, from `out_shardings`, a sharding constraint or a `jax.device_put`."""
    made_by = {id(var): (eqn.params, number) for eqn in jaxpr.eqns for number, var in enumerate(eqn.outvars)}

    def of(params: Mapping[str, Any], number: int) -> Any:
        given = [params[key][number] for key in ("out_shardings", "devices") if key in params]
        given.append(params.get("sharding"))
        found = next((each for each in given if isinstance(each, jax.sharding.Sharding) or is_format(each)), None)
        if found is None and "out_shardings" in params:
            return _shardings(params["jaxpr"].jaxpr)[number]
        return with_layout(found, params["out_layouts"][number]) if found and "out_layouts" in params else found

    return [of(*made_by.get(id(var), ({}, 0))) for var in jaxpr.outvars]
