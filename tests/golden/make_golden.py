"""Make the golden checkpoint of the current format version: `python -m tests.golden.make_golden`.

Run it once per format version. The result is committed and never changes, since old checkpoints must keep loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jaxckpt_train as jct
from jaxckpt_train.store.manifest import FORMAT_VERSION

FOLDER = Path(__file__).parent / f"v{FORMAT_VERSION}"


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


if __name__ == "__main__":
    jct.save_checkpointables(FOLDER, {"state": golden_tree(), "notes": jct.JsonValue({"made": "once", "n": [1, 2.5]})})
