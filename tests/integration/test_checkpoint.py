"""One checkpoint: save, load and verify, wherever and however they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jaxckpt_train as jct

QUIET = """
import sys, jax, jax.numpy as jnp, numpy as np
import jaxckpt_train as jct
state = {"w": jnp.ones((8, 8)), "b": None, "f8": jnp.ones(3, jnp.float8_e5m2), "k": jax.random.key(0), "e": {}, "": 0.1}
rows = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x"))
state["mesh"] = jax.device_put(jnp.ones(8), rows)
path = sys.argv[1]
jct.save(path, state)
jct.save(path, state, overwrite=True)
jct.save_checkpointables(path + "2", {"state": state, "notes": jct.JsonValue(None)})
jct.load(path), jct.load(path, state), jct.metadata(path).checkpointables, jct.verify(path)
jct.load_checkpointables(path + "2")
jct.save_async(path + "3", state)
"""


def test_nothing_is_printed_and_nothing_warned_of(tmp_path: Path, run_python: Any) -> None:
    done = run_python(QUIET, tmp_path / "c", env={"PYTHONWARNINGS": "error"}, devices=8, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert jct.verify(tmp_path / "c3").ok
