"""Save and load over a bad network: `python -m tests.nightly.objects.networks [--mib 1024] [--trials 1000]`.

Large states go through a proxy before versitygw that answers 5 % of the requests with 503, cuts 1 % of the requests and
responses, and lets one connection stall for ever. Small states go to the stand-in, where responses are lost, too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxckpt_train as jct
from jaxckpt_train.settings import MIB, ObjectStoreSettings
from tests.support.objects.faults import RandomFaults
from tests.support.objects.proxy import Proxy
from tests.support.objects.servers import VersityGw
from tests.support.objects.stand_in import StandIn

ARRAYS = 8
PART_BYTES = ObjectStoreSettings().part_bytes
# A stalled request is given up and repeated after this time, which a save with a stall takes longer. On loopback a part
# takes far less than a second.
REQUEST_TIMEOUT_S = 3.0
MOST_SLOWDOWN = 2.0
SEED = 42


def settings(**options: Any) -> jct.StoreSettings:
    """Return settings that give up a stalled request soon."""
    return jct.StoreSettings(object_store=ObjectStoreSettings(**{"request_timeout_s": REQUEST_TIMEOUT_S, **options}))


def random_state(mib: int, seed: int) -> dict[str, np.ndarray]:
    """Return arrays of random bytes."""
    random = np.random.default_rng(seed)
    return {f"a{number}": random.integers(0, 256, mib * MIB // ARRAYS, np.uint8) for number in range(ARRAYS)}


def is_same(found: Any, state: dict[str, np.ndarray]) -> bool:
    """Return whether all bytes are those of the state."""
    return found.keys() == state.keys() and all(np.array_equal(found[name], state[name]) for name in state)


def timed_trip(url: str, state: dict[str, np.ndarray]) -> tuple[float, float]:
    """Save and load; return the seconds of each.

    Raises:
        AssertionError: other bytes were loaded.
    """
    chosen, start = settings(), time.perf_counter()
    jct.save(url, state, settings=chosen)
    saved = time.perf_counter()
    found = jct.load(url, settings=chosen)
    loaded = time.perf_counter()
    assert is_same(found, state)
    return saved - start, loaded - saved


@contextlib.contextmanager
def stalling(proxy: Proxy) -> Iterator[None]:
    """Let one connection stall for ever in the middle of a part, once parts are being sent."""
    enough, ended = proxy.counters.sent_bytes + 2 * PART_BYTES, threading.Event()

    def stall() -> None:
        while proxy.counters.sent_bytes < enough and not ended.wait(0.01):
            pass
        proxy.stall_next(PART_BYTES // 2)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(stall)
        try:
            yield
        finally:
            ended.set()


def large_trips(mib: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of a save and a load, without and with faults."""
    state, found = random_state(mib, SEED), {}
    with (
        VersityGw() as server,
        Proxy(server.endpoint, seed=SEED) as proxy,
        server.access.through(proxy.endpoint).named(),
    ):
        timed_trip(server.url("first"), random_state(1, SEED))
        found["without faults"] = timed_trip(server.url("good"), state)
        proxy.fail, proxy.cut_request, proxy.cut_response = 0.05, 0.005, 0.005
        with stalling(proxy):
            found["with faults"] = timed_trip(server.url("bad"), state)
        print(proxy.counters)
        assert proxy.counters.stalled == 1
    return found


def small_trips(trials: int, seed: int = SEED) -> Counter[str]:
    """Save and load many small states under random faults, and count how that ended.

    Raises:
        AssertionError: other bytes were loaded, or something else than an error of this library was raised.
    """
    outcomes = Counter[str]()
    with StandIn("s3") as server, server.named():
        for trial in range(trials):
            state = {"a": np.random.default_rng(trial).integers(0, 256, 5000, np.uint8)}
            server.faults = RandomFaults(seed + trial, fail=0.05, cut=0.01, lose=0.02)
            url, chosen = server.url(f"small/{trial}"), settings()
            try:
                jct.save(url, state, settings=chosen)
                outcomes["saved"] += 1
                assert is_same(jct.load(url, settings=chosen), state), f"trial {trial}: other bytes"
                outcomes["loaded"] += 1
            except jct.CheckpointError as error:
                outcomes[type(error).__name__] += 1
                print(f"trial {trial}: {error}")
            server.requests.clear()
    return outcomes


def main() -> None:
    """Run both campaigns, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--trials", type=int, default=1000)
    options = parser.parse_args()
    print(f"{options.trials} small states: {dict(small_trips(options.trials))}, 0 wrong bytes", flush=True)
    if (why_not := VersityGw.install()) is not None:
        print(f"SKIP large states: versitygw: {why_not}")
        return
    times = large_trips(options.mib)
    for name, (save_s, load_s) in times.items():
        print(f"{options.mib} MiB {name}: save {save_s:.1f} s, load {load_s:.1f} s")
    good, bad = times["without faults"], times["with faults"]
    print(f"slower by {bad[0] / good[0]:.2f} and {bad[1] / good[1]:.2f}, expected at most {MOST_SLOWDOWN:g}")


if __name__ == "__main__":
    main()
