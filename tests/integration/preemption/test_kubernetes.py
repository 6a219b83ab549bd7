"""KubernetesNotice warns if SIGTERM cannot reach the process; tested in separate PID namespaces."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPO_ROOT
from tests.support.cluster_programs import can_be_process_1, in_a_container

START = """
import logging
logging.basicConfig(format="%(message)s")
from jaxckpt_train.preemption.sources import KubernetesNotice
source = KubernetesNotice()
source.start()
assert source.notice() is None
source.stop()
"""
needs_root = pytest.mark.skipif(not can_be_process_1(), reason="a PID namespace needs root, on Linux")


def said(command: list[str], **variables: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO_ROOT), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr


@needs_root
def test_shell_that_is_process_1_is_warned_of() -> None:
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, START]  # without `; true` the shell would exec Python
    found = said(in_a_container(*shell), KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert found.count("\n") == 1
    assert "process 1 of this container is a shell (sh)" in found


@needs_root
@pytest.mark.parametrize(
    "command", [[sys.executable, "-c", START], ["sh", "-c", 'exec "$0" -c "$1"', sys.executable, START]]
)
def test_python_as_process_1_is_fine(command: list[str]) -> None:
    assert said(in_a_container(*command, sys.executable, "-c", START), KUBERNETES_SERVICE_HOST="10.0.0.1") == ""


def test_missing_pod_is_warned_of() -> None:
    found = said([sys.executable, "-c", START])
    assert "found no KUBERNETES_SERVICE_HOST" in found
