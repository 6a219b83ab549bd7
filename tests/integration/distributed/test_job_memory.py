"""Colocated memory of real processes: others see what a process wrote before its message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxckpt_train.distributed.shared_memory import ColocatedMemory

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system"),
    pytest.mark.timeout(120),
]

SIZE, TURNS = 50_000, 200
PROCESS = (
    "import sys; from tests.integration.distributed.test_job_memory import be_process; be_process(int(sys.argv[1]))"
)


def be_process(number: int) -> None:
    memory = ColocatedMemory(SIZE)
    print(memory.address.hex(), flush=True)
    memory.join([bytes.fromhex(word) for word in sys.stdin.readline().split()], number)
    print("joined", flush=True)
    sys.stdin.readline()
    memory.hide()
    take_turns(memory)
    memory.close()
    print("right")


def take_turns(memory: ColocatedMemory) -> None:
    """Write at the same time as the others, and check what all wrote before the next turn."""
    for turn in range(TURNS):
        while min(memory.taken) < turn:
            memory.wait()
        memory.data[memory.process][:] = (turn * 3 + memory.process) % 256
        memory.announce(turn + 1, turn)
        for process, data in enumerate(memory.data):
            while memory.given[process] <= turn:
                memory.wait()
            assert memory.given[process] == turn + 1
            assert np.all(data == (turn * 3 + process) % 256), (turn, process)
        memory.announce(turn + 1, turn + 1)


def test_processes_see_everything_the_others_wrote(repo_root: Path) -> None:
    own = ColocatedMemory(SIZE)
    others = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repo_root)},
        )
        for number in (1, 2)
    ]
    try:
        addresses = [own.address.hex(), *(line_of(process).strip() for process in others)]
        for process in others:
            send_line(process, " ".join(addresses))
        own.join([bytes.fromhex(address) for address in addresses], 0)
        assert [line_of(process) for process in others] == ["joined\n"] * 2
        for process in others:
            send_line(process, "all have joined")
        take_turns(own)
        assert [process.communicate(timeout=60)[0] for process in others] == ["right\n"] * 2
    finally:
        for process in others:
            process.kill()
            process.communicate()
        own.hide()
        own.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def send_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
