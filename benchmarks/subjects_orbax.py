"""The subjects `orbax_v0...` and `orbax_v1...`: Orbax's two interfaces, with their default options and with others.

A finished save of either has synced the array data and the directories that hold it (TensorStore does that), but not
the metadata files, nor the rename to the final name (traced with Orbax 0.12.8). So `durable` is False here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.arrays import State
from benchmarks.subject import Wait

PACKAGES = ("orbax-checkpoint", "tensorstore", "jax", "jaxlib", "numpy")


class OrbaxV0:
    """`StandardCheckpointer`, whose `save` is asynchronous; for a part a `PyTreeCheckpointHandler`, see `load`."""

    arrays = "jax"
    durable = False
    packages = PACKAGES

    def __init__(self, **options: Any) -> None:
        import orbax.checkpoint

        self._ocp = orbax.checkpoint
        self._checkpointer = self._ocp.StandardCheckpointer(**options)
        self._partial = self._ocp.Checkpointer(self._ocp.PyTreeCheckpointHandler())

    def start_save(self, path: Path, state: State) -> Wait:
        self._checkpointer.save(path, state)
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, like: State) -> State:
        """All of it through the same checkpointer; a part, which it cannot, through `partial_restore`."""
        if like.keys() == {"params"}:
            return self._partial.restore(path, args=restore_args(self._ocp, like, partial=True))
        return self._checkpointer.restore(path, like)

    def close(self) -> None:
        self._partial.close()
        self._checkpointer.close()


class OrbaxV0WithoutOcdbt(OrbaxV0):
    """One directory for each array, in Zarr format, instead of the OCDBT key-value store."""

    def __init__(self) -> None:
        super().__init__(use_ocdbt=False)


class OrbaxV0WithoutCompression:
    """`AsyncCheckpointer(PyTreeCheckpointHandler(use_compression=False))`: `StandardCheckpointer` lacks the option."""

    arrays = "jax"
    durable = False
    packages = PACKAGES

    def __init__(self) -> None:
        import orbax.checkpoint

        self._ocp = orbax.checkpoint
        self._checkpointer = self._ocp.AsyncCheckpointer(self._ocp.PyTreeCheckpointHandler(use_compression=False))

    def start_save(self, path: Path, state: State) -> Wait:
        self._checkpointer.save(path, args=self._ocp.args.PyTreeSave(state))
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, like: State) -> State:
        partial = like.keys() == {"params"}
        return self._checkpointer.restore(path, args=restore_args(self._ocp, like, partial=partial))

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxV0Broadcast:
    """A checkpointer with the `SingleReplicaArrayHandler`: one replica, along axis 0 of the mesh, reads for all.

    It sends by adding up what the replicas have, the others zeros: denormal floats and some nan come out as others.
    """

    arrays = "jax"
    durable = False
    packages = PACKAGES

    def __init__(self) -> None:
        import jax
        import orbax.checkpoint

        self._ocp, self._tree = orbax.checkpoint, jax.tree
        handlers = self._ocp.type_handlers
        registry = handlers.create_type_handler_registry((jax.Array, handlers.SingleReplicaArrayHandler()))
        handler = self._ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        self._checkpointer = self._ocp.AsyncCheckpointer(handler)

    def start_save(self, path: Path, state: State) -> Wait:
        self._checkpointer.save(path, args=self._ocp.args.PyTreeSave(state))
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, like: State) -> State:
        each = self._tree.map(self._restore_args, like)
        return self._checkpointer.restore(path, args=self._ocp.args.PyTreeRestore(item=like, restore_args=each))

    def close(self) -> None:
        self._checkpointer.close()

    def _restore_args(self, leaf: Any) -> Any:
        return self._ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        )


class OrbaxV1:
    """The free functions `save_async` and `load` of `orbax.checkpoint.experimental.v1`, within a `Context`."""

    arrays = "jax"
    durable = False
    packages = PACKAGES

    def __init__(self, **saving: bool) -> None:
        import orbax.checkpoint.experimental.v1 as orbax_v1

        self._orbax = orbax_v1
        self._saving = saving

    def start_save(self, path: Path, state: State) -> Wait:
        with self._context():
            response = self._orbax.save_async(path, state)

        def wait() -> None:
            response.result()

        return wait

    def load(self, path: Path, like: State) -> State:
        with self._context(partial=like.keys() == {"params"}):
            return self._orbax.load(path, like)

    def close(self) -> None:
        """The free functions keep nothing."""

    def _context(self, *, partial: bool = False) -> Any:
        context = self._orbax.Context()
        for option, value in self._saving.items():
            setattr(context.array.saving, option, value)
        context.pytree.loading.partial_load = partial
        return context


class OrbaxV1WithoutOcdbt(OrbaxV1):
    """One directory for each array instead of the OCDBT key-value store."""

    def __init__(self) -> None:
        super().__init__(use_ocdbt=False)


class OrbaxV1WithoutCompression(OrbaxV1):
    """Without zstd."""

    def __init__(self) -> None:
        super().__init__(use_compression=False)


def restore_args(ocp: Any, like: State, *, partial: bool) -> Any:
    """The arguments with which a `PyTreeCheckpointHandler` restores arrays as `like` describes them."""
    each = ocp.checkpoint_utils.construct_restore_args(like)
    return ocp.args.PyTreeRestore(item=like, restore_args=each, partial_restore=partial)
