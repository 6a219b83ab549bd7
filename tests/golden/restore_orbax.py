"""Restore an exported step with the installed Orbax, and compare every byte.

`python restore_orbax.py STEP EXPECTED`: STEP is a directory with the item `state`, and EXPECTED is a JSON file of its
content as `make_orbax.py` writes it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
from make_orbax import VERSION, done, encoded, ocp

LEAVES = {"array", "value", "bytes"}


def leaves_of(node, path=()):
    """Return the leaves of an encoded tree by path, whatever the kinds of its containers."""
    ((kind, found),) = node.items()
    if kind in LEAVES:
        return {path: node}
    children = found.items() if isinstance(found, dict) else enumerate(found)
    return {key: leaf for name, child in children for key, leaf in leaves_of(child, (*path, str(name))).items()}


def content(leaf):
    """Return the part of a leaf that must be equal: numbers may have become 0-d arrays."""
    ((kind, found),) = leaf.items()
    if kind == "array":
        dtype, shape, _, data = found
        return dtype, tuple(shape), data
    if isinstance(found, (bool, int, float)):
        dtype, shape, _, data = encoded(np.asarray(found))["array"]
        return dtype, tuple(shape), data
    return found


def assert_equal(restored, expected):
    found, wanted = leaves_of(encoded(restored)), leaves_of(expected)
    wanted = {path: leaf for path, leaf in wanted.items() if leaf != {"value": None} or path in found}
    found = {path: leaf for path, leaf in found.items() if leaf != {"value": None} or path in wanted}
    assert sorted(found) == sorted(wanted), sorted(set(found) ^ set(wanted))
    for path, leaf in wanted.items():
        assert content(found[path]) == content(leaf), (path, found[path], leaf)


def by_handler(step):
    """Restore by the class that all versions have."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    restored = checkpointer.restore(step / "state")
    done(checkpointer)
    return restored


def by_manager(step):
    names = {"item_names": ("state",)} if VERSION < (0, 7) else {}
    manager = ocp.CheckpointManager(step.parent, **names)
    args = ocp.args.Composite(state=ocp.args.PyTreeRestore())
    restored = manager.restore(int(step.name), args=args)["state"]
    done(manager)
    return restored


def by_standard(step):
    checkpointer = ocp.StandardCheckpointer()
    restored = checkpointer.restore(step / "state")
    done(checkpointer)
    return restored


def by_v1(step):
    from orbax.checkpoint import v1

    if "checkpointable_name" in inspect.signature(v1.load_pytree).parameters:
        return v1.load_pytree(step, checkpointable_name="state")
    return v1.load_pytree(step)


WAYS = {"handler": by_handler, "manager": by_manager, "standard": by_standard, "v1": by_v1}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", type=Path)
    parser.add_argument("expected", type=Path)
    options = parser.parse_args()
    expected = json.loads(options.expected.read_text())["state"]
    for way, restore in WAYS.items():
        try:
            assert_equal(jax.device_get(restore(options.step.absolute())), expected)
        except Exception as error:  # noqa: BLE001  # versions without this form fail in many ways
            traceback.print_exc()
            print(f"{way}: no: {type(error).__name__}: {str(error)[:300]!r}", flush=True)
            continue
        print(f"{way}: restored", flush=True)


if __name__ == "__main__":
    sys.exit(main())
