"""Problems of other checkpointers in daily use: memory."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import RunPython

# 12, 13. Host memory of a save is bounded and does not grow; a restore does not double memory.
# The peak of this program; getrusage would count the peak of its parent process too.
PEAK = """
def peak_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
"""
MEMORY = (
    PEAK
    + """
import statistics, sys, psutil, jax, numpy as np, jax.numpy as jnp, jaxckpt_train as jct
MIB = 1 << 20
own = psutil.Process()
state = {f"w{n}": jnp.asarray(np.random.default_rng(n).random(16 * MIB // 4, np.float32)) for n in range(12)}
jct.save(sys.argv[1] + "/tiny", {"x": jnp.zeros(3)})  # imports what the first save needs
before, used = own.memory_info().rss / MIB, []
jct.save(sys.argv[1] + "/first", state)
with jct.StepManager(sys.argv[1] + "/run", preservation_policy=jct.LatestN(1)) as manager:
    for step in range(50):
        manager.save(step, {"state": state})
        manager.wait()
        used.append(own.memory_info().rss / MIB)
early, late = statistics.median(used[5:15]), statistics.median(used[-10:])
print(before, early, late, peak_mib())
"""
)
LOAD = (
    PEAK
    + """
import sys, psutil, jax, jaxckpt_train as jct
like = jct.metadata(sys.argv[1]).checkpointables["state"].tree
state = jax.block_until_ready(jct.load(sys.argv[1], like))
print(psutil.Process().memory_info().rss / 2**20, peak_mib())
"""
)


def test_fifty_saves_stay_within_staging_budget(tmp_path: Path, run_python: RunPython) -> None:
    before, early, late, peak = map(float, run_python(MEMORY, tmp_path, check=True, fresh=True).stdout.split())
    assert late - early < 24, f"RSS grew from {early:.0f} to {late:.0f} MiB"
    assert peak - before < 96 + 32, f"peak {peak:.0f} MiB, {before:.0f} before the first save; the state has 192"
    final, top = map(float, run_python(LOAD, tmp_path / "first", check=True, fresh=True).stdout.split())
    assert top - final < 64, f"peak {top:.0f} MiB, {final:.0f} with the result"
