"""What must hold of the leaves after each operation: that a checkpoint of them can be written, and opened again."""

from __future__ import annotations

from jaxckpt_train.errors import MismatchError
from jaxckpt_train.store.array_bounds import array_bytes
from jaxckpt_train.store.manifest import MAX_ARRAYS
from jaxckpt_train.surgery.leaves import Leaves
from jaxckpt_train.tree.paths import MAX_DEPTH, one_below_another, parse_key, split

MOST_BYTES = 1 << 44
"""No operation makes a larger array: 16 TiB, a million pieces."""


def check_leaves(leaves: Leaves, before: Leaves, subject: str) -> None:
    """Check what an operation has made.

    Args:
        leaves: all that there are.
        before: those that there were.
        subject: the operation, for messages.

    Raises:
        MismatchError: a leaf lies below another one, its path is none, an array is too large, or there are too many.
    """
    if len(leaves) > MAX_ARRAYS:
        raise MismatchError(f"{subject}: makes {len(leaves):,} leaves, expected at most {MAX_ARRAYS:,}")
    if leaves.keys() != before.keys():
        _check_paths(leaves, before, subject)
    known = {id(leaf.view) for leaf in before.values()}
    for name, leaf in leaves.items():
        if leaf.view is not None and id(leaf.view) not in known:
            size = array_bytes(leaf.view.shape, leaf.view.dtype.itemsize)
            if size is None or size > MOST_BYTES:
                raise MismatchError(
                    f"{subject}: leaf {name!r} would be {leaf.text():.200}, expected a shape that arrays can have, of "
                    f"at most {MOST_BYTES >> 40} TiB"
                )


def _check_paths(leaves: Leaves, before: Leaves, subject: str) -> None:
    for name in leaves.keys() - before.keys():
        try:
            for key in split(name):
                parse_key(key)
        except (ValueError, OverflowError) as error:
            raise MismatchError(f"{subject}: {name!r:.200} is no path of a leaf: {error}") from error
        if name.count("/") >= MAX_DEPTH:
            raise MismatchError(f"{subject}: leaf {name!r:.200} is deeper than {MAX_DEPTH} levels")
    pair = one_below_another(leaves)
    if pair is not None:
        raise MismatchError(
            f"{subject}: leaf {pair[0]!r} would lie below leaf {pair[1]!r}; drop one, or give it another path"
        )
