"""What Orbax's `args` mean here: which checkpointable they save, which target they restore into.

Objects of Orbax, of Grain, and those of `orbax_args` are known by the names of their classes; none is imported.

Handlers of Orbax that save and restore in a way of their own: each item writes and reads its own files.

What the manager in Orbax's form says of a run, a step and a tree, with Orbax's names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys
import threading
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxckpt_train.checkpoint_metadata import CheckpointableMetadata
from jaxckpt_train.checkpointables.iterator_state import PerProcess
from jaxckpt_train.checkpointables.pytree import JsonValue
from jaxckpt_train.checkpointables.stateful import DirectoryAwaitingCreation
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CorruptCheckpointError, SettingsError
from jaxckpt_train.integrations import orbax_args
from jaxckpt_train.integrations.orbax_args import Composite
from jaxckpt_train.integrations.orbax_trees import TreeTarget
from jaxckpt_train.pytree.flatten import flatten, unflatten
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.manifest import MAX_INFO_BYTES

_FOLDER, _FILE, _OLD_FILE = "metadata", "_ROOT_METADATA", "metadata"
_TREES = ("Standard", "PyTree", "Array", "JaxRandomKey")
_OTHERS = ("Json", "NumpyRandomKey", "Checkpoint", "PyGrainCheckpoint")
_KINDS = {f"{name}{what}": (name, what) for name in (*_TREES, *_OTHERS) for what in ("Save", "Restore")}
_COMPOSITE, DEFAULT_ITEM = "Composite", "default"
_HANDLERS = {f"{name}CheckpointHandler": name for name in (*_TREES, "Json", "NumpyRandomKey")}
# In which Orbax's checkpointers put a handler that no args are registered for.
_WRAPPER = "LegacyCheckpointHandlerWrapper"
_SAVES_BY_ITSELF = {"save", "async_save", "restore"}
# What a load here does not do, by attribute: the values that are fine, and what to do instead.
_UNDONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "strict": ((True,), "arrays are neither cut nor padded: restore what was saved, and change it then"),
    "support_layout": ((False,), "arrays are restored in the default layout of their devices"),
    "transforms": ((None, {}), 'use jaxckpt_train.load(manager.path(step), like, rename={"old/**": "new/**"})'),
    "legacy_transform_fn": ((None,), 'use jaxckpt_train.load(manager.path(step), like, rename={"old/**": "new/**"})'),
    "custom_metadata": ((None,), "it is kept for a step, not for an item: pass it to save(..., custom_metadata=...)"),
}


@dataclasses.dataclass(frozen=True)
class RootMetadata:
    """What was given with a run.

    Attributes:
        custom_metadata: as given to the manager that made the run; {}: nothing.
        internal_metadata: {}.
    """

    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    internal_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """What a step holds.

    Attributes:
        item_metadata: as `CheckpointManager.item_metadata` gives it.
        metrics: numbers by name.
        custom_metadata: as given to `save`; {}: nothing.
    """

    item_metadata: Any
    metrics: Mapping[str, float]
    custom_metadata: Any


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata(Mapping[str, Any]):
    """What one tree of a step holds: `tree`, and its top level by key. It is a pytree with the leaves of `tree`.

    Attributes:
        tree: nested dicts and lists, with a `jax.ShapeDtypeStruct` for each array and number, else the value itself.
        custom_metadata: None: such is kept for a step.
    """

    custom_metadata = None

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __repr__(self) -> str:
        return f"TreeMetadata({self.tree!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """For JAX: `tree` is the only child."""
        return ((jax.tree_util.GetAttrKey("tree"), self.tree),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> TreeMetadata:
        """For JAX."""
        return cls(children[0])


def write_root_metadata(directory: str, metadata: Mapping[str, Any]) -> None:
    """Keep what was given with a run in a file of its own, where Orbax has it, unless there is one.

    Raises:
        SettingsError: it is no plain JSON data, or 1 MiB of it and more.
    """
    try:
        data = json.dumps({"internal_metadata": {}, "custom_metadata": dict(metadata)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"CheckpointManager: metadata: expected plain JSON data, found {error}") from error
    if len(data) > MAX_INFO_BYTES:
        raise SettingsError(f"CheckpointManager: metadata: expected at most {MAX_INFO_BYTES} bytes, found {len(data)}")
    backend = LocalBackend()
    backend.make_directory(f"{directory}/{_FOLDER}", parents=True, sync=True)
    backend.write_new(f"{directory}/{_FOLDER}/{_FILE}", data.encode())


def read_root_metadata(directory: str) -> dict[str, Any] | None:
    """What was given with a run, also one that Orbax has written; None: nothing.

    Raises:
        CorruptCheckpointError: the file holds something else.
    """
    for name in (_FILE, _OLD_FILE):
        data = read_or_none(LocalBackend(), f"{directory}/{_FOLDER}", name, MAX_INFO_BYTES)
        if data is None:
            continue
        try:
            found = json.loads(data)
        except ValueError as error:
            raise CorruptCheckpointError(f"{directory}/{_FOLDER}/{name}: expected JSON, found {error}") from error
        custom = found.get("custom_metadata") if name == _FILE and isinstance(found, dict) else found
        if not isinstance(custom, dict):
            raise CorruptCheckpointError(f"{directory}/{_FOLDER}/{name}: expected an object of JSON, found {custom!r}")
        return custom
    return None


class HandledItem:
    """What a handler saves, or has restored, as an object of the protocol `StatefulCheckpointable`.

    Args:
        handler: Orbax's, or one of a program.
        args: what its `save` or `restore` is given.

    Attributes:
        taken: set once the handler needs what is saved no more.
        restored: what the handler has restored.
    """

    def __init__(self, handler: Any, args: Any) -> None:
        self._handler, self._args = handler, args
        self.taken, self.restored = threading.Event(), None

    async def save(self, directory: DirectoryAwaitingCreation) -> Awaitable[None]:
        """Have the handler save in the background."""
        return self._save(directory)

    async def _save(self, directory: DirectoryAwaitingCreation) -> None:
        folder, writes = _path(await directory.await_creation()), None
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
        """Say that it is needed no more, as the save has ended: something else may have failed before."""
        self.taken.set()

    async def load(self, directory: Path) -> None:
        """Have the handler restore."""
        self.restored = self._handler.restore(_path(directory), args=self._args)


def _path(directory: Path) -> Any:
    """The directory in the form that Orbax gives it to handlers."""
    return importlib.import_module("etils.epath").Path(directory)


def refuse_many_processes(name: str) -> None:
    """Raise SettingsError in a job of several processes, whose handlers would have to wait for one another."""
    if current().processes > 1:
        raise SettingsError(
            f"args of {name!r}: expected args of Orbax or Grain in a job of several processes, found a handler that "
            "saves in a way of its own: register it by jaxckpt_train.register_handler(type, handler)"
        )


def args_classes(handler: Any) -> tuple[Any, Any]:
    """The classes of args with which a handler saves and restores.

    Raises:
        ValueError: none are registered.
    """
    found: tuple[Any, Any] = importlib.import_module("orbax.checkpoint.checkpoint_args").get_registered_args_cls(
        handler
    )
    return found


def registered_handler_class(args: Any) -> type | None:
    """The class of the handler that a program has registered for args; None: they are not Orbax's, or it has none."""
    known = sys.modules.get("orbax.checkpoint.checkpoint_args")
    if known is None or not isinstance(args, known.CheckpointArgs):
        return None
    try:
        found: type = known.get_registered_handler_cls(args)
    except ValueError:
        return None
    return found


_HANDLERS |= {"CheckpointHandler": "Checkpoint", "PyGrainCheckpointHandler": "PyGrainCheckpoint"}


class UnknownItemError(SettingsError, KeyError):
    """A step has no item of this name; Orbax raises KeyError."""

    __str__ = Exception.__str__


@dataclasses.dataclass(frozen=True)
class Target:
    """What one checkpointable is loaded into, where it is no tree.

    Attributes:
        like: the target of the load.
    """

    like: Any

    def finished(self, loaded: Any) -> Any:
        """What was restored, without the mark that says how it was saved."""
        if isinstance(loaded, HandledItem):
            return loaded.restored
        return loaded.value if isinstance(loaded, (JsonValue, PerProcess)) else loaded


class Items:
    """The checkpointables of a manager: one without a name, or several by name, and what args each takes.

    Args:
        item_names: their names; None: args say them.
        item_handlers: Orbax's handlers, one or several by name; None: args say what is saved.
        handler_registry: a registry of Orbax's handlers; None: args say what is saved.
        checkpointers: Orbax's checkpointers, one or several by name, whose handlers take `items`; None: `args` only.

    Attributes:
        is_async: whether one of the checkpointers saves in the background; None: there are none.
        is_single: whether there is one without a name; None: nothing has shown it yet.

    Raises:
        SettingsError: two of these exclude each other, or one is no handler.
    """

    def __init__(
        self, item_names: Any, item_handlers: Any, handler_registry: Any = None, checkpointers: Any = None
    ) -> None:
        given = {"handler_registry": handler_registry, "checkpointers": checkpointers, "item_handlers": item_handlers}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1 or (item_names is not None and named not in ([], ["item_handlers"])):
            raise SettingsError(f"CheckpointManager: expected one of {', '.join(given)} or item_names, found several")
        handlers = item_handlers if checkpointers is None else _handlers_of(checkpointers)
        self.is_async = None if checkpointers is None else _is_async(checkpointers)
        has_names = isinstance(handlers, Mapping)
        if item_names is not None and handlers is not None and not has_names:
            raise SettingsError("CheckpointManager: item_names: expected None with a single handler in item_handlers")
        by_name = handlers if has_names else {DEFAULT_ITEM: handlers}
        entries = {(name, None): each for name, each in by_name.items() if each is not None}
        if handler_registry is not None:
            entries = dict(handler_registry.get_all_entries())
        self._kinds: dict[str, set[str]] = {}
        self._own: dict[tuple[str | None, type | None], Any] = {}  # by item and class of args, None: any
        for (name, cls), handler in entries.items():
            kind = _handler_kind(name, handler)
            if kind is None:
                self._own[name, cls] = handler
            elif name is not None:
                self._kinds.setdefault(name, set()).add(kind)
        self._names = None if item_names is None and not has_names else {*(item_names or ()), *(handlers or ())}
        self.is_single: bool | None = None
        if self._names is not None or (handlers is not None and handler_registry is None):
            self.is_single = self._names is None

    def to_save(self, args: Any, items: Any = None, save_kwargs: Any = None) -> dict[str, Any]:
        """What is to be saved, by name.

        Raises:
            SettingsError: these are no args to save with, a name is unknown, or there is one where several are
                expected.
        """
        named = self._named(args) if items is None else self._args_of("Save", args, items, save_kwargs)
        handlers = {name: self._own_handler(name, each) for name, each in named.items()}
        for name, each in named.items():
            self._check(name, each, handlers[name])
        return {
            name: checkpointable_of(name, each) if handlers[name] is None else HandledItem(handlers[name], each)
            for name, each in named.items()
        }

    def targets(
        self,
        args: Any,
        saved: Mapping[str, CheckpointableMetadata] | None,
        items: Any = None,
        restore_kwargs: Any = None,
    ) -> dict[str, Target | TreeTarget]:
        """What is restored into what, by name; empty: all, without targets.

        Args:
            args: those to restore with; None: all, as it was saved.
            saved: what there is, by name; None: that is not known.
            items, restore_kwargs: of the deprecated form, instead of args.

        Raises:
            UnknownItemError: the step has no such item.
            SettingsError: these are no args to restore with, or there is one where several are expected.
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

    def _target(self, name: str, args: Any, saved: CheckpointableMetadata | None) -> Target | TreeTarget:
        handler = self._own_handler(name, args)
        if handler is None:
            return target_of(name, args, saved)
        return Target(HandledItem(handler, args_classes(handler)[1]() if args is None else args))

    def _own_handler(self, name: str, args: Any) -> Any:
        """The handler that saves and restores an item in a way of its own; None: this package does."""
        keys = [(name, type(args)), (None, type(args)), (name, None)]
        handler = next((self._own[key] for key in keys if key in self._own), None)
        cls = registered_handler_class(args) if handler is None and name not in self._kinds else None
        if cls is not None and _handler_kind(name, cls) is None:
            try:
                handler = cls()
            except TypeError as error:
                raise SettingsError(f"args of {name!r}: pass their handler by item_handlers: {error}") from error
            self._own[name, None] = handler
        if handler is not None:
            refuse_many_processes(name)
        return handler

    def found(self, values: Mapping[str, Any]) -> Any:
        """What a caller gets of these: the one, or a Composite."""
        is_one = self.is_single is not False and values.keys() == {DEFAULT_ITEM}
        return values[DEFAULT_ITEM] if is_one else Composite(**values)

    def _named(self, args: Any) -> dict[str, Any]:
        if args is None:
            raise SettingsError("args: expected one of args.StandardSave, ..., or an args.Composite, found None")
        is_single = not _is_composite(args)
        if self.is_single is None:
            self.is_single = is_single
        if self.is_single != is_single:
            expected = "args of one checkpointable" if self.is_single else "an args.Composite"
            raise SettingsError(f"args: expected {expected}, as before, found {type(args).__qualname__}")
        return {DEFAULT_ITEM: args} if is_single else dict(args.items())

    def _args_of(self, what: str, args: Any, items: Any, kwargs: Any) -> dict[str, Any]:
        """The args of the deprecated form, in which each item is known by the handler of its checkpointer."""
        if args is not None or _is_composite(items) or any(_plain_name(cls) in _KINDS for cls in type(items).__mro__):
            raise SettingsError(
                "items: expected None with args, which are given by keyword: args=args.StandardSave(item)"
            )
        if self.is_single:
            items, kwargs = {DEFAULT_ITEM: items}, {DEFAULT_ITEM: kwargs}
        items, kwargs, found = items or {}, kwargs or {}, {}
        for name in {**items, **kwargs}:
            kinds, own, more = self._kinds.get(name), self._own.get((name, None)), kwargs.get(name) or {}
            if own is not None:
                found[name] = args_classes(own)[what == "Restore"](items.get(name), **more)
                continue
            if kinds is None:
                raise SettingsError(
                    f"items: {name!r}: expected one of {', '.join(map(repr, self._kinds)) or 'none'}, whose handlers "
                    "are known: give what is saved as args, such as args=args.StandardSave(item)"
                )
            cls = getattr(orbax_args, f"{next(iter(kinds))}{what}")
            found[name] = cls(**({"item": items.get(name)} if "item" in cls.__dataclass_fields__ else {}), **more)
        return found

    def _check(self, name: str, args: Any, own: Any) -> None:
        """Refuse args that Orbax has no handler for, with these names and handlers."""
        if self._names is not None and name not in self._names:
            raise SettingsError(
                f"item {name!r} does not match with any registered handler: expected one of item_names or "
                f"item_handlers, {', '.join(map(repr, sorted(self._names)))}"
            )
        kinds, kind = self._kinds.get(name), None if own is not None else _kind_of(name, args, "Save")
        if kinds is not None and kind not in kinds:
            raise SettingsError(
                f"args of {name!r}: {kind}Save does not match with any registered handler: expected "
                f"{' or '.join(sorted(f'{each}Save' for each in kinds))}"
            )


def checkpointable_of(name: str, args: Any) -> Any:
    """What is to be saved under a name.

    Raises:
        SettingsError: it is no args to save with, or asks for what is not done here.
    """
    kind = _kind_of(name, args, "Save")
    _refuse_undone(name, args)
    if kind == "Json":
        return JsonValue(args.item)
    if kind == "NumpyRandomKey":
        return PerProcess(args.item)
    save_args = getattr(args, "save_args", None)
    return args.item if save_args is None else _converted(args.item, save_args)


def target_of(name: str, args: Any, saved: CheckpointableMetadata | None) -> Target | TreeTarget:
    """What a checkpointable is restored into.

    Args:
        name: of it.
        args: those to restore with; None: as it was saved.
        saved: what it is like; None: that is not known.

    Raises:
        SettingsError: it is no args to restore with, or asks for what is not done here.
    """
    if args is None:
        return Target(None) if saved is None or saved.tree is None else TreeTarget(name, None, saved)
    kind = _kind_of(name, args, "Restore")
    _refuse_undone(name, args)
    if kind == "Json":
        return Target(JsonValue(None))
    if kind == "NumpyRandomKey":
        return Target(PerProcess(None))
    if kind not in _TREES:
        return Target(args.item)
    item = None if kind == "Array" else getattr(args, "item", None)
    item = item.tree if isinstance(item, TreeMetadata) else item
    return TreeTarget(
        name,
        item,
        saved,
        restore_args=getattr(args, "restore_args", None),
        fallback=getattr(args, "fallback_sharding", None),
        leaves_count=kind == "Standard",
        is_partial=getattr(args, "partial_restore", False) or getattr(args, "transforms", None) == {},
    )


def _is_composite(args: object) -> bool:
    return any(_plain_name(cls) == _COMPOSITE for cls in type(args).__mro__)


def _plain_name(cls: type) -> str:
    return cls.__name__.removesuffix("Args")


def _kind_of(name: str, args: object, what: str) -> str:
    for cls in type(args).__mro__:
        kind, found = _KINDS.get(_plain_name(cls), ("", ""))
        if found == what:
            return kind
    cls, known = type(args), ", ".join(f"{kind}{what}" for kind in (*_TREES, *_OTHERS[:-1]))
    raise SettingsError(
        f"args of {name!r}: expected one of args.{known}, found {cls.__module__}.{cls.__qualname__}; an object of "
        "another kind is saved as JSON, or by a handler (jaxckpt_train.register_handler) and StandardSave(object)"
    )


def _handler_kind(name: str | None, handler: Any) -> str | None:
    """The args that a handler of Orbax, or its class, takes, such as "PyTree"; None: it saves in a way of its own.

    Raises:
        SettingsError: it is no handler.
    """
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
    """The handlers of Orbax's checkpointers, one or several by name."""
    if isinstance(checkpointers, Mapping):
        return {name: _handlers_of(each) for name, each in checkpointers.items()}
    handler = getattr(checkpointers, "handler", None)
    if handler is None:
        raise SettingsError(f"CheckpointManager: checkpointers: expected those of Orbax, found {checkpointers!r}")
    return handler


def _is_async(checkpointers: Any) -> bool:
    each = checkpointers.values() if isinstance(checkpointers, Mapping) else [checkpointers]
    return any(cls.__name__ == "AsyncCheckpointer" for one in each for cls in type(one).__mro__)


def _refuse_undone(name: str, args: object) -> None:
    for attribute, (fine, instead) in _UNDONE.items():
        found = getattr(args, attribute, fine[0])
        if not any(found is value or found == value for value in fine):
            raise SettingsError(f"args of {name!r}: {attribute}: expected {fine[0]}, found {found!r}: {instead}")


def _converted(item: Any, save_args: Any) -> Any:
    """The tree with its leaves in the dtypes that Orbax's `SaveArgs` name."""
    flat, wanted = flatten(item), flatten(save_args)
    dtypes = {path: getattr(each, "dtype", None) for path, each in zip(wanted.names, wanted.leaves, strict=True)}
    leaves = [_in_dtype(leaf, dtypes.get(path)) for path, leaf in zip(flat.names, flat.leaves, strict=True)]
    return item if all(map(lambda one, other: one is other, leaves, flat.leaves)) else unflatten(item, leaves)


def _in_dtype(leaf: Any, dtype: Any) -> Any:
    if dtype is None or leaf is None:
        return leaf
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)
    return np.asarray(leaf).astype(dtype).item() if isinstance(leaf, (bool, int, float)) else leaf
