"""JAX's key-value store on loopback: how long its calls take, by size and by how many ask at once."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.machine import ROOT
from jaxckpt_train.distributed.coordinator import ManyProcesses
from jaxckpt_train.distributed.jax_service import JaxKeyValues
from jaxckpt_train.distributed.rendezvous import Contributions

SIZES = (16, 512, 32 << 10, 512 << 10, 4 << 20)
LISTED = (("1,000 of 40 B", 1000, 40), ("10,000 of 40 B", 10_000, 40), ("100,000 of 40 B", 100_000, 40))
LISTED += (("32 of 35 KB", 32, 35 << 10), ("32 of 350 KB", 32, 350 << 10), ("32 of 2 MB", 32, 2 << 20))
CALLS, SECONDS = 200, 3.0
CLIENTS_OF_A_PROCESS = 16


def client_of(address: str, number: int) -> Any:
    """A client of the service, as `jax.distributed.initialize` makes one."""
    from jax._src.lib import _jax

    client = _jax.get_distributed_runtime_client(address, number, init_timeout=60, use_compression=True)
    client.connect()
    return client


@contextlib.contextmanager
def serving(clients: int) -> Iterator[str]:
    """A service for this many clients, in this process: its address. They must have ended before it does."""
    from jax._src.lib import _jax

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, clients, heartbeat_timeout=100)
    yield address
    service.shutdown()


def one_by_one(client: Any) -> dict[str, dict[str, float]]:
    """Microseconds of single calls, median, by size of the value."""
    values = JaxKeyValues(client)
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        value, calls = os.urandom(size), CALLS if size < 1 << 20 else 20
        setting = _median(lambda n, value=value, size=size: values.set(f"one/{size}/{n}", value), calls)  # type: ignore[misc]
        getting = _median(lambda n, size=size: values.get(f"one/{size}/{n}", 1.0), calls)  # type: ignore[misc]
        found[f"{size:,} B"] = {"set": setting, "get": getting}
        values.delete("one")
    found["any"] = {
        "increment": _median(lambda n: values.increment("one/count"), CALLS),
        "get, not there": _median(lambda n: values.get("one/none", 0.0), CALLS),
    }
    return found


def listed(client: Any) -> dict[str, dict[str, float]]:
    """Milliseconds to have all values below a folder, and to delete them."""
    values, found = JaxKeyValues(client), {}
    for name, count, size in LISTED:
        value = os.urandom(size)
        for number in range(count):
            values.set(f"all/{number}", value)
        finding = _median(lambda n: values.find("all"), 3) / 1e3
        found[name] = {"find": finding, "delete": _median(lambda n: values.delete("all"), 1) / 1e3}
    return found


def _median(call: Callable[[int], object], calls: int) -> float:
    taken = []
    for number in range(calls):
        started = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - started)
    return 1e6 * statistics.median(taken)


def together(clients: int) -> dict[str, float]:
    """Exchanges and barriers of this many clients, 16 in a process, and the calls per second of the service."""
    starts = range(0, clients, CLIENTS_OF_A_PROCESS)
    with serving(clients) as address:
        command = [sys.executable, "-m", "benchmarks.scale_latency", "--clients", str(clients), "--address", address]
        others = [
            subprocess.Popen([*command, "--first", str(first)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for first in starts
        ]
        answers = [json.loads(each.communicate()[0].splitlines()[-1]) for each in others]
    return {
        "exchange_ms": max(each["exchange_ms"] for each in answers),
        "barrier_ms": max(each["barrier_ms"] for each in answers),
        "calls_per_s": sum(each["calls_per_s"] for each in answers),
    }


def gathered(processes: int, size: int) -> dict[str, float]:
    """Seconds in which process 0, which runs the service, hears values of that size; one client gives them all."""
    with serving(2) as address:
        command = [sys.executable, "-m", "benchmarks.scale_latency", "--address", address, "--clients", str(processes)]
        other = subprocess.Popen([*command, "--give", str(size)], cwd=ROOT, stdout=subprocess.DEVNULL)
        client, started = client_of(address, 0), time.process_time()
        values = JaxKeyValues(client)
        while values.get("gathered/given", 5.0) is None:
            pass
        given, wall = time.process_time(), time.perf_counter()
        found = Contributions(values, "gathered", processes)
        total = sum(map(len, found.of(found.look())))
        taken = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - started, "mib": total / (1 << 20)}
        taken["cpu_while_given_s"] = given - started
        values.set("gathered/end", b"")
        client.shutdown()
        other.wait()
    return taken


def give_all(address: str, processes: int, size: int) -> None:
    """Give what all processes but the first give, of which 4 in 9 bytes are digests, which cannot be compressed."""
    client = client_of(address, 1)
    values = JaxKeyValues(client)
    for process in range(1, processes):
        digests = os.urandom(4 * size // 9)
        Contributions(values, "gathered", processes).give(process, digests + bytes(size - len(digests)))
    values.set("gathered/given", b"")
    while values.get("gathered/end", 5.0) is None:
        pass
    client.shutdown()


def join(address: str, first: int, clients: int) -> dict[str, float]:
    """What some of the clients measure, a thread for each."""
    numbers = range(first, min(first + CLIENTS_OF_A_PROCESS, clients))
    with ThreadPoolExecutor(len(numbers)) as pool:
        found = list(pool.map(lambda number: client_of(address, number), numbers))
        ready = threading.Barrier(len(numbers))
        both = list(zip(found, numbers, strict=True))
        measured = list(pool.map(lambda each: _measured(*each, clients, ready), both))
        for client in found:
            pool.submit(client.shutdown)
    return {
        "exchange_ms": max(each[0] for each in measured),
        "barrier_ms": max(each[1] for each in measured),
        "calls_per_s": sum(each[2] for each in measured),
    }


def _measured(client: Any, number: int, clients: int, ready: threading.Barrier) -> tuple[float, float, float]:
    values = JaxKeyValues(client)
    job = ManyProcesses(values, number, clients)
    job.exchange("starting", bytes)
    exchange_us = _median(lambda n: job.exchange("measuring", lambda: b"x" * 40, _first), 10)
    barrier_us = _median(lambda n: client.wait_at_barrier(f"measured-{n}", 60_000), 10)
    job.exchange("asking", bytes)
    ready.wait()
    calls, end = 0, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        values.set(f"alive/{number}", b"%d" % calls)
        calls += 1
    job.exchange("ending", bytes)
    return exchange_us / 1e3, barrier_us / 1e3, calls / SECONDS


def _first(values: Sequence[bytes]) -> bytes:
    return values[0]


def main() -> None:
    """Measure as one of the processes of `together`, and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--give", type=int, default=None)
    options = parser.parse_args()
    if options.give is None:
        print(json.dumps(join(options.address, options.first, options.clients)))
    else:
        give_all(options.address, options.clients, options.give)
    sys.stdout.flush()
    os._exit(0)  # the service's threads do not wait for the last client


if __name__ == "__main__":
    main()
