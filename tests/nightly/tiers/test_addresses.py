"""Addresses at which hosts serve their files: names that lead to loopback, and names without an IPv4 address."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import fast, namespaces
from tests.support.jobs.job import Job
from tests.support.paths import REPO_ROOT


def test_host_whose_own_name_is_loopback_serves_the_others(tmp_path: Path) -> None:
    """As Debian writes it into /etc/hosts."""
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with namespaces.network(2) as names:
        job = Job(2, 1, names)
        try:
            saved = fast.saves_if_the_name_of_a_host_is_loopback_there
            job.call(saved, str(tmp_path / "slow"), str(tmp_path / "fast"))
        finally:
            job.end()
    assert len(list((tmp_path / "fast").glob("host*/run-*/step-0000000001*"))) == 2


def test_name_without_an_ipv4_address_is_found(tmp_path: Path) -> None:
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    hosts, program = tmp_path / "hosts", tmp_path / "program.py"
    hosts.write_text("fd00::7 node0\n")
    program.write_text("from jaxckpt_train.store.backends.peers import local_address\nprint(local_address('node0'))\n")
    made = f"ip link set lo up && ip addr add fd00::7/128 dev lo nodad && mount --bind {hosts} /etc/hosts"
    command = ["unshare", "--mount", "--net", "sh", "-c", f"{made} && exec {sys.executable} {program}"]
    found = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert found.stdout == "fd00::7\n", found.stderr
