"""Saves to object servers and loads by PyTorch DCP, by Orbax and by ours, in turn, each through a slow network."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import obstore

from benchmarks import cost_command, page_cache
from benchmarks.cost_process import run_fresh
from benchmarks.machine import versions
from benchmarks.objects_arrays import MIB
from benchmarks.registry import OURS, TORCH_PYTHON
from tests.support.objects.access import Access
from tests.support.objects.proxy import Proxy
from tests.support.objects.servers import FakeGcs, RealServer

LATENCY_S, BYTES_PER_S = 0.1, 200e6
DCP_OPTIONS: dict[str, dict[str, Any]] = {
    # `sync_files` calls `os.sync`, which here would sync the files of the server, too.
    "DCP, defaults": {"writer": {"sync_files": False}},
    # s3fs sends the parts of a file, and DCP reads files, one after another. So there are some files, each sent and got
    # in one request; with more files a load would wait longer for requests than a save gains.
    "DCP, tuned": {
        "writer": {"sync_files": False, "thread_count": 4},
        "s3fs in a save": {"default_block_size": 512 * MIB},
        "s3fs in a load": {"default_cache_type": "all"},
    },
}
ORBAX_VARIANTS = {"Orbax, defaults": "OrbaxV0", "Orbax, no compression": "OrbaxV0WithoutCompression"}
TORCH_PACKAGES = ("torch", "s3fs")
ORBAX_PACKAGES = ("orbax-checkpoint", "tensorstore", "gcsfs")

Figures = dict[str, Any]
"""Versions, and the seconds of each round by what was done and by whom; or why a peer is left out."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One that saves and loads in turn with others.

    Attributes:
        save: the function that saves, as `module:name`.
        load: the function that loads what was saved.
        bucket: the URL below which it saves.
        variables: of the environment, by which it reaches the server.
        arguments: of both functions, in addition to the bucket and the size.
        python: the interpreter of its processes.
    """

    save: str
    load: str
    bucket: str
    variables: Mapping[str, str]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    python: Path | str = sys.executable


def measure(options: argparse.Namespace, server: RealServer) -> dict[str, Any]:
    """The figures of each peer, and our own with it."""
    peers: dict[str, Any] = {"network": {"latency_s": LATENCY_S, "bytes_per_s": BYTES_PER_S}}
    for name, measured in (("dcp", with_dcp), ("orbax", with_orbax)):
        try:
            peers[name] = measured(options, server)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            peers[name] = {"left_out": f"failed: {error}"}
    return peers


def with_dcp(options: argparse.Namespace, server: RealServer) -> Figures:
    """PyTorch DCP with its default options and with better ones, and ours, on one server."""
    module = "benchmarks.objects_torch"
    installed = {}
    if TORCH_PYTHON.exists():
        installed = run_fresh("benchmarks.machine:versions", {"packages": TORCH_PACKAGES}, python=TORCH_PYTHON)
    if not installed or None in installed.values():
        return {"left_out": "no PyTorch environment with s3fs: `make bench-torch` makes it"}
    with _proxy(server) as proxy:
        access = server.access.through(proxy.endpoint)
        subjects = {OURS: _ours(access)}
        for name, given in DCP_OPTIONS.items():
            subjects[name] = Subject(
                f"{module}:save_by_dcp",
                f"{module}:load_by_dcp",
                access.url(),
                access.environment(),
                {"folder": name.replace(", ", "-"), "options": given},
                TORCH_PYTHON,
            )
        seconds = _take_turns(options, subjects, server.access)
    return {"versions": installed, "options": DCP_OPTIONS, "seconds": seconds}


def with_orbax(options: argparse.Namespace, server: RealServer) -> Figures:
    """Orbax on an emulator of Google Cloud Storage, and ours on another server."""
    module = "benchmarks.objects_orbax"
    installed = versions(ORBAX_PACKAGES)
    if installed["gcsfs"] is None:
        return {"left_out": "gcsfs is not installed: `make bench-gcs` installs it"}
    why_not = FakeGcs.install()
    if why_not is not None:
        return {"left_out": f"{FakeGcs.name}: {why_not}"}
    with FakeGcs() as emulator, _proxy(server) as proxy, _proxy(emulator) as other:
        subjects = {OURS: _ours(server.access.through(proxy.endpoint))}
        for name, variant in ORBAX_VARIANTS.items():
            subjects[name] = Subject(
                f"{module}:save_by_orbax",
                f"{module}:load_by_orbax",
                emulator.url(),
                _variables_of_orbax(other.endpoint),
                {"variant": variant},
            )
        seconds = _take_turns(options, subjects, server.access)
    return {"versions": installed | {FakeGcs.name: FakeGcs.version}, "seconds": seconds}


def _variables_of_orbax(endpoint: str) -> dict[str, str]:
    """How TensorStore and gcsfs reach an emulator, without a look for credentials."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": endpoint,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "STORAGE_EMULATOR_HOST": endpoint,
        "FSSPEC_GCS": '{"token": "anon"}',
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google about the bucket
    }


def empty(access: Access) -> None:
    """Remove all objects of the bucket."""
    store = access.store()
    for found in obstore.list(store):
        obstore.delete(store, [each["path"] for each in found])


def _proxy(server: RealServer) -> Proxy:
    return Proxy(server.endpoint, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)


def _ours(access: Access) -> Subject:
    module = "benchmarks.objects_turns"
    return Subject(f"{module}:save_by_us", f"{module}:load_by_us", access.url(), access.environment())


def _take_turns(
    options: argparse.Namespace, subjects: Mapping[str, Subject], access: Access
) -> dict[str, dict[str, list[float]]]:
    """Seconds of saves and loads. Round 0 is the warm-up, and is left out; who is first changes from round to round."""
    names = list(subjects)
    found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in names} for what in ("save", "load")}
    for number in range(options.rounds + 1):
        first = number % len(names)
        order = names[first:] + names[:first]
        for what, seconds in found.items():
            for name in order:
                took = _turn(subjects[name], what, options)
                cost_command.progress.print(f"round {number}: {what}, {name}: {took:.2f} s", markup=False)
                if number > 0:
                    seconds[name].append(took)
        empty(access)
    return found


def _turn(subject: Subject, what: str, options: argparse.Namespace) -> float:
    page_cache.settle()
    variables = [f"{name}={value}" for name, value in subject.variables.items()]
    arguments = {"bucket": subject.bucket, "mib": options.mib, "is_quick": options.quick, **subject.arguments}
    function, under = getattr(subject, what), [*options.under, "env", *variables]
    seconds: float = run_fresh(function, arguments, under=under, python=subject.python)["seconds"]
    return seconds
