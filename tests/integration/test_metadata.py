"""Metadata: the contents of a checkpoint, read on any machine without touching a device or the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jaxckpt_train as jct
from tests.support.described_states import state
from tests.support.same_trees import assert_same

NO_DEVICE = """
import sys
import jaxckpt_train as jct
import jax._src.xla_bridge as bridge
described = jct.metadata(sys.argv[1])
part = described.checkpointables["state"]
print(part.leaves["w"].description, part.tree["keys"].shape, jct.verify(sys.argv[1]).ok)
assert not bridge._backends, bridge._backends
"""


def test_no_device_is_touched(tmp_path: Path, run_python: Any) -> None:
    jct.save(tmp_path / "c", state())
    # A platform that does not exist here: touching any device would fail.
    done = run_python(NO_DEVICE, tmp_path / "c", env={"JAX_PLATFORMS": "tpu"}, check=True)
    assert done.stdout == "float32[16,16] (3,) True\n"


ONE_DEVICE = """
import sys, jax, numpy as np
import jaxckpt_train as jct
assert jax.device_count() == 1
found = jct.load(sys.argv[1])
np.testing.assert_array_equal(found["w"], np.arange(256.0, dtype=np.float32).reshape(16, 16))
np.testing.assert_array_equal(found["rows"].astype(np.float32), np.arange(64).reshape(8, 8))
assert type(found["w"]) is np.ndarray
like = {"w": jax.ShapeDtypeStruct((16, 16), "float32"), "rows": ..., "keys": ..., "host": ..., "point": ...}
placed = jct.load(sys.argv[1], like)["w"]
np.testing.assert_array_equal(placed, found["w"])
jct.save(sys.argv[2], {"w": placed})
"""


def test_eight_device_checkpoint_loads_on_one_device(tmp_path: Path, run_python: Any) -> None:
    tree = state()
    jct.save(tmp_path / "eight", tree)
    run_python(ONE_DEVICE, tmp_path / "eight", tmp_path / "one", check=True)
    back = jct.load(tmp_path / "one", {"w": tree["w"]})
    assert_same(back, {"w": tree["w"]})
