"""Make the golden checkpoints of both format versions: `python -m tests.golden.make_golden 1` (or 2).

Run it once per format version. The result is committed and never changes, since old checkpoints must keep loading.
Version 2 has index files, which jobs of several processes write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jaxckpt_train as jct
from jaxckpt_train.store.manifest import FORMAT_VERSION, INDEXED_VERSION
from tests.support.jobs.arrays import global_array
from tests.support.jobs.job import Job

FOLDER = Path(__file__).parent / f"v{FORMAT_VERSION}"
INDEXED = Path(__file__).parent / f"v{INDEXED_VERSION}"


def golden_tree() -> dict[str, Any]:
    """One of everything, without randomness."""
    params = {"Dense_0": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}}
    return {
        "params": params,
        "opt_state": optax.adam(1e-3).init(params),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 2),
        "numpy": {"big": np.arange(5, dtype=">i4"), "scalar": np.float16(1.5), "empty": np.zeros((0, 3))},
        "small": {"int4": np.arange(-4, 4).astype(ml_dtypes.int4), "fp8": np.arange(4).astype(ml_dtypes.float8_e4m3fn)},
        "python": {"int": 10**30, "float": -0.0, "complex": 1 + 2j, "str": "naïve ☃", "bytes": b"\0\xff", "none": None},
        "keys of many kinds": {0: 1, 7: 2},
        "a.b": 1,
        "a/b": 2,
        "": 3,
        "empty": [{}, [], ()],
        "flag": True,
    }


def sharded_tree() -> dict[str, Any]:
    """Arrays over the four devices of a job of two processes."""
    kernel = global_array([16, 6], [2, 2], ["x", "y"], "float32")
    return {"kernel": kernel, "rows": global_array([8, 3], [4], ["x"], "bfloat16"), "scale": global_array([5], [4], [])}


def save_indexed(path: str) -> None:
    """In each process of the job."""
    settings = jct.StoreSettings(index_files=True)
    jct.save_checkpointables(path, {"state": sharded_tree(), "notes": jct.JsonValue({"n": 1})}, settings=settings)


if __name__ == "__main__":
    if sys.argv[1] == "2":
        Job(2, 2).call(save_indexed, str(INDEXED))
        sys.exit()
    jct.save_checkpointables(FOLDER, {"state": golden_tree(), "notes": jct.JsonValue({"made": "once", "n": [1, 2.5]})})
