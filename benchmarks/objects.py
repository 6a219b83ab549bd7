"""Saves to object servers on loopback and loads, against obstore alone and peers: `python -m benchmarks.objects`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore

from benchmarks import cost_command, objects_peers, objects_report, page_cache
from benchmarks.cost_process import run_fresh
from benchmarks.machine import version
from benchmarks.objects_arrays import ARRAYS
from benchmarks.objects_turns import SMALL_ARRAYS, SMALL_BYTES
from jaxckpt_train import StoreSettings
from tests.support.objects.servers import SERVERS, Moto, RealServer, VersityGw
from tests.support.objects.stand_in import StandIn

ROUNDS, QUICK_ROUNDS = 5, 1
FULL_MIB, QUICK_MIB = 1024, 64
STEPS, QUICK_STEPS = 1000, 50
STAND_IN = "stand-in"
CHOICES = (VersityGw.name, Moto.name, STAND_IN)
# In a round, those of a group go in this order or in the other.
GROUPS = (("put_by_obstore", "save_by_us"), ("get_by_obstore", "load_by_us", "restore_by_us"))

Server = RealServer | StandIn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, print the tables, and write the figures as JSON and as a page if asked."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parse(given)
    with cost_command.working_directory(options.dir) as directory:
        machine = cost_command.machine_of(directory)
        with _temporary_files_below(directory), _started(options.server) as server:
            results = _about(options, given) | _measure(options, server)
            if isinstance(server, VersityGw):
                results["peers"] = objects_peers.measure(options, server)
    cost_command.finish(options, machine, results)
    objects_report.show(cost_command.stdout_console(), machine, results)
    if options.page:
        objects_report.write(options.page, machine, results)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = cost_command.parser("objects", __doc__ or "")
    parser.add_argument("--server", choices=CHOICES, default=CHOICES[0], help=f"default {CHOICES[0]}")
    parser.add_argument("--mib", type=int, help=f"size of the state; default {FULL_MIB}, with --quick {QUICK_MIB}")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}, and at least (with --quick {QUICK_ROUNDS})")
    parser.add_argument("--page", type=Path, help=f"folder for {objects_report.PAGE}")
    options = parser.parse_args(arguments)
    fewest = QUICK_ROUNDS if options.quick else ROUNDS
    options.rounds = fewest if options.rounds is None else options.rounds
    if options.mib is None:
        options.mib = QUICK_MIB if options.quick else FULL_MIB
    options.steps = QUICK_STEPS if options.quick else STEPS
    if options.rounds < fewest:
        parser.error(f"--rounds: expected at least {fewest}, found {options.rounds}")
    if options.mib < ARRAYS or options.mib % ARRAYS:
        parser.error(f"--mib: expected a multiple of {ARRAYS}, which is the number of arrays, found {options.mib}")
    if options.server in SERVERS and (why_not := SERVERS[options.server].install()) is not None:
        parser.error(f"--server: expected one that can be installed, found {options.server}: {why_not}")
    return options


def _about(options: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    """How the figures were made."""
    settings = StoreSettings()
    server_version = {VersityGw.name: VersityGw.version, Moto.name: version("moto")}.get(options.server)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.objects", *given]),
        "server": " ".join(filter(None, (options.server, server_version))),
        "versions": {"obstore": obstore.__version__},
        "size": {
            "mib": options.mib,
            "arrays": ARRAYS,
            "small_arrays": SMALL_ARRAYS,
            "small_bytes": SMALL_BYTES,
            "steps": options.steps,
        },
        "settings": {
            "part_bytes": settings.object_store.part_bytes,
            "concurrency": settings.object_store.concurrency,
            "staging_bytes": settings.staging_bytes,
        },
    }


def _measure(options: argparse.Namespace, server: Server) -> dict[str, Any]:
    """All samples. Round 0 is the warm-up, and is left out."""
    speed: dict[str, list[Any]] = {name: [] for group in GROUPS for name in group}
    memory: dict[str, list[Any]] = {"save": [], "no save": []}
    small: list[Any] = []
    for number in range(options.rounds + 1):
        found = {}
        for group in GROUPS:
            for name in group if number % 2 else reversed(group):
                found[name] = _turn(name, options, server, mib=options.mib, is_quick=options.quick)
        objects_peers.empty(server.access)
        peaks = {}
        for name in memory:
            peaks[name] = _turn("peak_memory", options, server, mib=options.mib, saves=name == "save")
            objects_peers.empty(server.access)
        one_small = _turn("save_small", options, server)
        objects_peers.empty(server.access)
        _say(f"round {number}: " + ", ".join(f"{name} {sample['seconds']:.2f} s" for name, sample in found.items()))
        if number > 0:
            for name, sample in found.items():
                speed[name].append(sample)
            for name, sample in peaks.items():
                memory[name].append(sample)
            small.append(one_small)
    return {"speed": speed, "memory": memory, "small": small, "requests": _requests(options)}


def _requests(options: argparse.Namespace) -> dict[str, list[list[str]]]:
    """The kinds of the requests, which a stand-in counts; the server matters for times alone."""
    counted: dict[str, list[list[str]]] = _fresh(
        "count_resumes", options.under, steps=options.steps, times=options.rounds
    )
    return counted | {"save of small arrays": _fresh("count_small", options.under, times=options.rounds)}


def _turn(name: str, options: argparse.Namespace, server: Server, **arguments: Any) -> Any:
    """A measurement in a process of its own, which reaches the server by its environment."""
    page_cache.settle()
    variables = [f"{variable}={value}" for variable, value in server.environment().items()]
    return _fresh(name, [*options.under, "env", *variables], bucket=server.url(), **arguments)


def _fresh(name: str, under: Sequence[str], **arguments: Any) -> Any:
    return run_fresh(f"benchmarks.objects_turns:{name}", arguments, under=under)


@contextlib.contextmanager
def _started(name: str) -> Iterator[Server]:
    with StandIn() if name == STAND_IN else SERVERS[name]() as server:
        yield server


@contextlib.contextmanager
def _temporary_files_below(directory: Path) -> Iterator[None]:
    """Let servers keep their data on the disk that was asked for."""
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _say(text: str) -> None:
    cost_command.progress.print(text, markup=False)


if __name__ == "__main__":
    main()
