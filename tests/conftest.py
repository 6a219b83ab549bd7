"""What every test runs under: eight CPU devices, strict rank promotion, repeatable properties; runs scripts too."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

# Before the first import of jax. A run on accelerators asks for them: JAX_PLATFORMS=cuda,cpu make test
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings

from tests.support import warm_python
from tests.support.paths import REPO_ROOT

DEVICES = 8
NIGHTLY = REPO_ROOT / "tests" / "nightly"
pytest_plugins = [
    "tests.support.bucket_paths",
    "tests.support.example_fixtures",
    "tests.support.jobs.fixtures",
    "tests.support.locks",
    "tests.support.report_fixtures",
    "tests.support.sinks",
]

# A shell starts its background jobs (`make test &` in a script) with interrupts ignored, and every process that they
# start inherits that. The tests that send interrupts must pass there too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the machines of CI are slow and noisy. The same examples each time: a failure is still there when it is
# looked at. `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--optimized`, for a run that compiles programs as users do."""
    parser.addoption("--optimized", action="store_true", help="programs are compiled as users' are: a third more")


def pytest_configure(config: pytest.Config) -> None:
    """Have XLA compile without optimizing, here and in all processes that are started: no program runs for long."""
    if not config.getoption("optimized"):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is below tests/nightly. Leave out single cases of other tiers that have this mark, unless asked for."""
    for item in items:
        if NIGHTLY in item.path.parents:
            item.add_marker("nightly")
    if "nightly" not in config.option.markexpr:
        left_out = {item for item in items if item.get_closest_marker("nightly") and NIGHTLY not in item.path.parents}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


class RunPython(Protocol):
    """Runs Python in a process of its own, which sees this repository's package first."""

    def __call__(
        self,
        script: str | Path,
        *arguments: str | os.PathLike[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        path: Sequence[Path] = (),
        devices: int = 1,
        check: bool = False,
        timeout_s: float = 120,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script file, or a text as by `python -c`.

        Args:
            script: a Path: the file to run; a str: the program itself.
            arguments: what follows on the command line.
            cwd: the directory to run in; None: that of the tests.
            env: variables to add.
            path: directories to put before the repository on PYTHONPATH.
            devices: CPU devices that jax shows there.
            check: raise, with the output in the message, unless the exit code is 0.
            timeout_s: kill it after this long, and raise.
            fresh: run in a new interpreter, and not in a fork of one that has imported the package: for assertions on
                imports, memory or time. Variables that Python itself reads have the same effect.
        """


@pytest.fixture(autouse=True, scope="module")
def _freeze_earlier_objects() -> None:
    """Exclude the objects of earlier test files from garbage collections, which would otherwise take a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the repository."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """See RunPython."""
    return _run_python


def _run_python(
    script: str | Path,
    *arguments: str | os.PathLike[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    path: Sequence[Path] = (),
    devices: int = 1,
    check: bool = False,
    timeout_s: float = 120,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    command = [*([str(script)] if isinstance(script, Path) else ["-c", script]), *map(os.fspath, arguments)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*path, REPO_ROOT])),
        "JAX_NUM_CPU_DEVICES": str(devices),
        **(env or {}),
    }
    if fresh or not warm_python.is_alike(variables):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    else:
        done = warm_python.run(command, variables, cwd=cwd, timeout_s=timeout_s)
    if check and done.returncode != 0:
        raise AssertionError(f"{done.args} left with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
