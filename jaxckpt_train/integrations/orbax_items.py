"""The items of the Orbax-style manager: converts Orbax's `args` to checkpointables and restore targets.

Args objects of Orbax, of Grain and of `orbax_args` are recognised by the names of their classes; neither library is
imported. An item with a custom Orbax handler is saved and restored by that handler, in its own files (`HandledItem`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import sys
import threading
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import msgspec
import numpy as np

from jaxckpt_train.checkpoint_metadata import CheckpointableMetadata
from jaxckpt_train.checkpointables.base import JsonValue
from jaxckpt_train.checkpointables.handlers import DirectoryAwaitingCreation
from jaxckpt_train.checkpointables.iterator_state import PerProcess
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CorruptCheckpointError, SettingsError
from jaxckpt_train.integrations import orbax_args
from jaxckpt_train.integrations.orbax_args import Composite
from jaxckpt_train.integrations.orbax_trees import TreeTarget
from jaxckpt_train.pytree.flatten import flatten, unflatten
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.manifest import MAX_INFO_BYTES, NOT_JSON, decode_value
from jaxckpt_train.store.timeouts import time_limited

_FOLDER, _FILE, _OLD_FILE = "metadata", "_ROOT_METADATA", "metadata"
_TREES = ("Standard", "PyTree", "Array", "JaxRandomKey")
_KNOWN = (*_TREES, "Json", "NumpyRandomKey", "Checkpoint")
_KINDS = {f"{name}{what}": (name, what) for name in (*_KNOWN, "PyGrainCheckpoint") for what in ("Save", "Restore")}
_COMPOSITE, DEFAULT_ITEM = "Composite", "default"
_HANDLERS = {f"{name}CheckpointHandler": name for name in (*_TREES, "Json", "NumpyRandomKey")}
_HANDLERS |= {"CheckpointHandler": "Checkpoint", "PyGrainCheckpointHandler": "PyGrainCheckpoint"}
# Orbax's checkpointers wrap a handler without registered args in this class.
_WRAPPER = "LegacyCheckpointHandlerWrapper"
_SAVES_BY_ITSELF = {"save", "async_save", "restore"}
_RENAME = 'use jaxckpt_train.load(manager.path(step), like, rename={"old/**": "new/**"})'
# Attributes of args that are not supported: the accepted values, and what to do instead.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "strict": ((True,), "arrays are neither truncated nor padded: restore the saved shape and change it afterwards"),
    "support_layout": ((False,), "arrays are restored in the default layout of their devices"),
    "transforms": ((None, {}), _RENAME),
    "legacy_transform_fn": ((None,), _RENAME),
    "custom_metadata": ((None,), "it belongs to the step, not to an item: pass it to save(..., custom_metadata=...)"),
}


@dataclasses.dataclass(frozen=True)
class RootMetadata:
    """The metadata of a run: what was passed to the manager that created it, or {}; `internal_metadata` is {}."""

    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    internal_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """The metadata of a step: of its items, its metrics by name, and the custom metadata passed to `save`, or {}."""

    item_metadata: Any
    metrics: Mapping[str, float]
    custom_metadata: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=[])
@dataclasses.dataclass(eq=False)
class TreeMetadata(Mapping[str, Any]):
    """The metadata of one tree of a step. It maps the top-level keys of `tree`, and is a pytree with its leaves.

    `tree` has a `jax.ShapeDtypeStruct` for each array and number; custom metadata belongs to the step, not to a tree.
    """

    tree: Any
    custom_metadata: ClassVar[None] = None

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)


@time_limited
def create_root(backend: Backend, directory: str) -> None:
    """Create the directory of a run."""
    backend.make_directory(directory, parents=True, sync=True)


@time_limited
def write_root_metadata(backend: Backend, directory: str, metadata: Mapping[str, Any]) -> None:
    """Write the metadata of a run to the file that Orbax uses, unless the file exists."""
    try:
        data = json.dumps({"internal_metadata": {}, "custom_metadata": dict(metadata)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"CheckpointManager: metadata: expected plain JSON data, found {error}") from error
    if len(data) > MAX_INFO_BYTES:
        raise SettingsError(f"CheckpointManager: metadata: expected at most {MAX_INFO_BYTES} bytes, found {len(data)}")
    backend.make_directory(f"{directory}/{_FOLDER}", parents=True, sync=True)
    backend.write_new(f"{directory}/{_FOLDER}/{_FILE}", data.encode())


@time_limited
def read_root_metadata(backend: Backend, directory: str) -> dict[str, Any] | None:
    """Read the metadata of a run; None: it has none. Raise CorruptCheckpointError if the file is not valid."""
    kinds: dict[str, Any] = {_FILE: RootMetadata, _OLD_FILE: dict[str, Any]}
    for name, kind in kinds.items():
        data = read_or_none(backend, f"{directory}/{_FOLDER}", name, MAX_INFO_BYTES)
        if data is None:
            continue
        try:
            found = msgspec.convert(decode_value(data), kind)
        except NOT_JSON as error:
            path = f"{directory}/{_FOLDER}/{name}"
            raise CorruptCheckpointError(f"{path}: expected JSON with metadata: {error}") from error
        custom: dict[str, Any] = found.custom_metadata if name == _FILE else found
        return custom
    return None


class HandledItem:
    """An item that an Orbax handler saves and restores, as a `StatefulCheckpointable`.

    `taken` is set once the handler no longer needs the item to save; `restored` is what the handler has restored.
    """

    def __init__(self, handler: Any, args: Any) -> None:
        self._handler, self._args = handler, args
        self.taken, self.restored = threading.Event(), None

    async def save(self, directory: DirectoryAwaitingCreation) -> Awaitable[None]:
        """Return an awaitable that saves in the background."""
        return self._save(directory)

    async def _save(self, directory: DirectoryAwaitingCreation) -> None:
        folder, writes = orbax_path(await directory.await_creation()), None
        try:
            if hasattr(self._handler, "async_save"):
                writes = await self._handler.async_save(folder, args=self._args)
            else:
                self._handler.save(folder, args=self._args)
        finally:
            self.taken.set()
        for write in writes or ():
            await asyncio.to_thread(write.result)
        self._handler.finalize(folder)

    def give_up(self, _: object) -> None:
        """Set `taken` at the end of a save that may have failed before the handler was called."""
        self.taken.set()

    async def load(self, directory: Path) -> None:
        """Restore the item with its handler."""
        self.restored = self._handler.restore(orbax_path(directory), args=self._args)


def orbax_path(directory: Path | str) -> Any:
    """Return a directory or URL as the `epath.Path` that Orbax uses."""
    return importlib.import_module("etils.epath").Path(directory)


def _args_class(handler: Any, what: str) -> Any:
    """Return the args class with which a handler saves or restores, as registered with Orbax."""
    registered = importlib.import_module("orbax.checkpoint.checkpoint_args").get_registered_args_cls(handler)
    return registered[what == "Restore"]


def _registered_handler_class(args: Any) -> type | None:
    """Return the handler class that is registered with Orbax for args, or None."""
    known = sys.modules.get("orbax.checkpoint.checkpoint_args")
    found: type | None = None
    if known is not None and isinstance(args, known.CheckpointArgs):
        with contextlib.suppress(ValueError):  # nothing is registered
            found = known.get_registered_handler_cls(args)
    return found


class UnknownItemError(SettingsError, KeyError):
    """The step has no item of this name. It is also a KeyError, which Orbax raises."""

    __str__ = Exception.__str__


class Items:
    """The items of a manager, a single unnamed one or several by name, and the args that each accepts.

    Attributes:
        is_async: whether one of the checkpointers saves in the background; None: there are no checkpointers.
        is_single: whether there is a single unnamed item; None: unknown until the first save or restore.
    """

    def __init__(self, item_names: Any, item_handlers: Any, handler_registry: Any, checkpointers: Any) -> None:
        given = {"handler_registry": handler_registry, "checkpointers": checkpointers, "item_handlers": item_handlers}
        named = [name for name, value in given.items() if value is not None]
        takes_names = not named or isinstance(item_handlers, Mapping)
        if len(named) > 1 or (item_names is not None and not takes_names):
            raise SettingsError(
                f"CheckpointManager: expected one of {', '.join(given)}, and item_names only alone or with handlers by "
                f"name, found {', '.join(named)}"
            )
        handlers = item_handlers if checkpointers is None else _handlers_of(checkpointers)
        self.is_async = None if checkpointers is None else _is_async(checkpointers)
        has_names = isinstance(handlers, Mapping)
        by_name = handlers if has_names else {DEFAULT_ITEM: handlers}
        entries = {(name, None): each for name, each in by_name.items() if each is not None}
        if handler_registry is not None:
            entries = dict(handler_registry.get_all_entries())
        self._kinds: dict[str, set[str]] = {}
        self._custom: dict[tuple[str | None, type | None], Any] = {}  # by item and args class; None: any
        for (name, cls), handler in entries.items():
            kind = _handler_kind(name, handler)
            if kind is None:
                self._custom[name, cls] = handler
            elif name is not None:
                self._kinds.setdefault(name, set()).add(kind)
        self._names = None if item_names is None and not has_names else {*(item_names or ()), *(handlers or ())}
        self.is_single = None if self._names is None and handlers is None else self._names is None

    def to_save(self, args: Any, items: Any, save_kwargs: Any) -> dict[str, Any]:
        """Return the checkpointables to save, by name, which `args` or the deprecated `items` describe."""
        named = self._named(args) if items is None else self._args_of("Save", args, items, save_kwargs)
        found: dict[str, Any] = {}
        for name, each in named.items():
            handler = self._custom_handler(name, each)
            self._check(name, each, handler)
            found[name] = _checkpointable_of(name, each) if handler is None else HandledItem(handler, each)
        return found

    def targets(
        self, args: Any, saved: Mapping[str, CheckpointableMetadata] | None, items: Any, restore_kwargs: Any
    ) -> dict[str, Any]:
        """Return the targets of a load by name, each a `TreeTarget` or a plain one; empty: restore everything.

        `saved` is the metadata of the saved items, if known; `items` and `restore_kwargs` are the deprecated form.
        """
        if self.is_single is None and saved:
            self.is_single = DEFAULT_ITEM in saved
        if items is not None or restore_kwargs is not None:
            named = self._args_of("Restore", args, items, restore_kwargs)
        else:
            named = dict.fromkeys(saved or ()) if args is None else self._named(args)
        there = named if saved is None else saved
        for name in named:
            if name not in there:
                raise UnknownItemError(f"item {name!r}: expected one of {', '.join(map(repr, there))}")
        return {name: self._target(name, each, (saved or {}).get(name)) for name, each in named.items()}

    def _target(self, name: str, args: Any, saved: CheckpointableMetadata | None) -> Any:
        handler = self._custom_handler(name, args)
        if handler is None:
            return _target_of(name, args, saved)
        return HandledItem(handler, _args_class(handler, "Restore")() if args is None else args)

    def _custom_handler(self, name: str, args: Any) -> Any:
        """Return the custom handler of an item; None: this package saves and restores it."""
        keys = [(name, type(args)), (None, type(args)), (name, None)]
        handler = next((self._custom[key] for key in keys if key in self._custom), None)
        cls = _registered_handler_class(args) if handler is None and name not in self._kinds else None
        if cls is not None and _handler_kind(name, cls) is None:
            try:
                handler = self._custom[name, None] = cls()
            except TypeError as error:
                raise SettingsError(
                    f"args of {name!r}: expected a handler that is created without arguments, found {cls.__qualname__}"
                    f": {error}. Pass a handler as item_handlers."
                ) from error
        if handler is not None and current().processes > 1:  # handlers would have to synchronise with each other
            raise SettingsError(
                f"args of {name!r}: expected args of Orbax or Grain in a multi-process job, found a custom handler: "
                "register it with jaxckpt_train.register_handler(type, handler)"
            )
        return handler

    def found(self, values: Mapping[str, Any]) -> Any:
        """Return the value of a single item, or a `Composite` of several."""
        is_one = self.is_single is not False and values.keys() == {DEFAULT_ITEM}
        return values[DEFAULT_ITEM] if is_one else Composite(**values)

    def _named(self, args: Any) -> dict[str, Any]:
        if args is None:
            raise SettingsError("args: expected args such as args.StandardSave or an args.Composite, found None")
        is_single = not _is_composite(args)
        if self.is_single not in (None, is_single):
            expected = "args of one checkpointable" if self.is_single else "an args.Composite"
            raise SettingsError(f"args: expected {expected} as in the previous calls, found {type(args).__qualname__}")
        self.is_single = is_single
        return {DEFAULT_ITEM: args} if is_single else dict(args.items())

    def _args_of(self, what: str, args: Any, items: Any, kwargs: Any) -> dict[str, Any]:
        """Convert the deprecated form, in which the handler of its checkpointer decides how an item is saved."""
        if args is not None or _is_composite(items) or any(_plain_name(cls) in _KINDS for cls in type(items).__mro__):
            raise SettingsError(
                f"items: expected None with args, found {type(items).__qualname__}: pass args by keyword, as in "
                "args=args.StandardSave(item)"
            )
        if self.is_single:
            items, kwargs = {DEFAULT_ITEM: items}, {DEFAULT_ITEM: kwargs}
        items, kwargs, found = items or {}, kwargs or {}, {}
        for name in {**items, **kwargs}:
            custom, options = self._custom.get((name, None)), kwargs.get(name) or {}
            if custom is None and name not in self._kinds:
                raise SettingsError(
                    f"items: expected an item with a handler ({', '.join(map(repr, self._kinds)) or 'none'}), found "
                    f"{name!r}: pass args instead, as in args=args.StandardSave(item)"
                )
            if custom is not None:
                cls = _args_class(custom, what)
            else:
                cls = getattr(orbax_args, f"{next(iter(self._kinds[name]))}{what}")
            given = [items.get(name)] if custom is not None or "item" in cls.__dataclass_fields__ else []
            found[name] = cls(*given, **options)
        return found

    def _check(self, name: str, args: Any, custom: Any) -> None:
        """Refuse names and args for which the manager has no handler."""
        if self._names is not None and name not in self._names:
            raise SettingsError(
                f"item {name!r} does not match with any registered handler: expected one of item_names or "
                f"item_handlers, {', '.join(map(repr, sorted(self._names)))}"
            )
        kinds = None if custom is not None else self._kinds.get(name)
        if kinds is not None and (kind := _kind_of(name, args, "Save")) not in kinds:
            raise SettingsError(
                f"args of {name!r}: {kind}Save does not match with any registered handler: expected "
                f"{' or '.join(sorted(f'{each}Save' for each in kinds))}"
            )


def _checkpointable_of(name: str, args: Any) -> Any:
    kind = _kind_of(name, args, "Save")
    _refuse_unsupported(name, args)
    if kind == "Json":
        return JsonValue(args.item)
    if kind == "NumpyRandomKey":
        return PerProcess(args.item)
    save_args = getattr(args, "save_args", None)
    return args.item if save_args is None else _converted(args.item, save_args)


def _target_of(name: str, args: Any, saved: CheckpointableMetadata | None) -> Any:
    if args is None:
        return TreeTarget(name, None, saved)
    kind = _kind_of(name, args, "Restore")
    _refuse_unsupported(name, args)
    if kind == "Json":
        return JsonValue(None)
    if kind == "NumpyRandomKey":
        return PerProcess(None)
    if kind not in _TREES:
        return args.item
    item = None if kind == "Array" else getattr(args, "item", None)
    return TreeTarget(
        name,
        item.tree if isinstance(item, TreeMetadata) else item,
        saved,
        restore_args=getattr(args, "restore_args", None),
        fallback=getattr(args, "fallback_sharding", None),
        leaves_count=kind == "Standard",
        is_partial=getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {},
    )


def finished(target: Any, loaded: Any) -> Any:
    """Return what was loaded as its target requests it, without the wrapper that selects its handler."""
    if isinstance(target, TreeTarget):
        loaded = target.finished(loaded)
    if isinstance(loaded, HandledItem):
        return loaded.restored
    return loaded.value if isinstance(loaded, (JsonValue, PerProcess)) else loaded


def _is_composite(args: object) -> bool:
    return any(_plain_name(cls) == _COMPOSITE for cls in type(args).__mro__)


def _plain_name(cls: type) -> str:
    return cls.__name__.removesuffix("Args")


def _kind_of(name: str, args: object, what: str) -> str:
    for cls in type(args).__mro__:
        kind, found = _KINDS.get(_plain_name(cls), ("", ""))
        if found == what:
            return kind
    cls, known = type(args), ", ".join(f"{kind}{what}" for kind in _KNOWN)
    raise SettingsError(
        f"args of {name!r}: expected one of args.{known}, found {cls.__module__}.{cls.__qualname__}: save other "
        "objects as JSON, or register a handler (jaxckpt_train.register_handler) and use StandardSave(object)"
    )


def _handler_kind(name: str | None, handler: Any) -> str | None:
    """Return the kind of args that a known Orbax handler or handler class accepts, such as "PyTree"; None: custom."""
    if type(handler).__name__.endswith(_WRAPPER):
        handler = vars(handler)["_handler"]
    for cls in (handler if isinstance(handler, type) else type(handler)).__mro__:
        if cls.__name__ in _HANDLERS:
            return _HANDLERS[cls.__name__]
        if not _SAVES_BY_ITSELF.isdisjoint(vars(cls)):
            return None
    raise SettingsError(
        f"CheckpointManager: item_handlers: {name!r}: expected a handler of Orbax or Grain, found {handler!r}"
    )


def _handlers_of(checkpointers: Any) -> Any:
    """Return the handler of an Orbax checkpointer, or a mapping from names to handlers."""
    if isinstance(checkpointers, Mapping):
        return {name: _handlers_of(each) for name, each in checkpointers.items()}
    handler = getattr(checkpointers, "handler", None)
    if handler is None:
        raise SettingsError(f"CheckpointManager: checkpointers: expected Orbax checkpointers, found {checkpointers!r}")
    return handler


def _is_async(checkpointers: Any) -> bool:
    each = checkpointers.values() if isinstance(checkpointers, Mapping) else [checkpointers]
    return any(cls.__name__ == "AsyncCheckpointer" for one in each for cls in type(one).__mro__)


def _refuse_unsupported(name: str, args: object) -> None:
    for attribute, (accepted, instead) in _UNSUPPORTED.items():
        found = getattr(args, attribute, accepted[0])
        if found not in accepted:
            raise SettingsError(f"args of {name!r}: {attribute}: expected {accepted[0]}, found {found!r}: {instead}")


def _converted(item: Any, save_args: Any) -> Any:
    """Return the tree with its leaves converted to the dtypes in a tree of `SaveArgs`."""
    flat, wanted = flatten(item), flatten(save_args)
    dtypes = {path: getattr(each, "dtype", None) for path, each in zip(wanted.names, wanted.leaves, strict=True)}
    leaves = [_in_dtype(leaf, dtypes.get(path)) for path, leaf in zip(flat.names, flat.leaves, strict=True)]
    is_same = all(one is other for one, other in zip(leaves, flat.leaves, strict=True))
    return item if is_same else unflatten(item, leaves)


def _in_dtype(leaf: Any, dtype: Any) -> Any:
    if dtype is None or leaf is None:
        return leaf
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)
    return np.asarray(leaf).astype(dtype).item() if isinstance(leaf, (bool, int, float)) else leaf
