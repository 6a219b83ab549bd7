"""The demo: a training that is preempted by real SIGTERMs has the same result, byte for byte, as an uninterrupted one.

`train_digits.py` runs in two directories. In one it runs without interruption. In the other it is preempted
in the middle, twice, and the same command is given again each time. The results are then compared.

    python examples/demo.py [--steps 2000] [--preemptions 2] [--directory DIRECTORY]

The directory may be a URL such as s3://bucket/run. Without AWS_ENDPOINT_URL, a server starts on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxckpt_train as jct

TRAIN = Path(__file__).parent / "train_digits.py"
PREEMPTED_CODE = 75
LIMIT_S = 120.0

Leaves = Mapping[str, bytes]


@dataclasses.dataclass
class Training:
    """The training in its own directory, always started by the same command.

    Attributes:
        directory: where its output is.
        steps: how many updates it does.
        url: where its checkpoints are; empty: in its directory.
    """

    directory: Path
    steps: int
    url: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def checkpoints(self) -> str:
        """The directory of its checkpoints."""
        return self.url or str(self.directory / "checkpoints")

    def start(self) -> None:
        """Start it, with its output in log.txt."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, str(TRAIN), f"steps={self.steps}", "losses=losses.txt",
            f"checkpoint.directory={self.url or 'checkpoints'}",
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, expected: int) -> None:
        """Wait for its end, and stop the demo unless it has the expected exit code."""
        assert self.process is not None
        code = self.process.wait(LIMIT_S)
        self.require(code == expected, f"it left with exit code {code}, expected {expected}")

    def stop(self) -> None:
        """Kill it if it still runs, because the demo failed."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait_for_update(self, number: int) -> None:
        """Wait until its losses show this many updates."""
        assert self.process is not None
        end = time.monotonic() + LIMIT_S
        while len(self.losses()) < number and self.process.poll() is None:
            self.require(time.monotonic() < end, f"update {number} was not reached in {LIMIT_S:g} seconds")
            time.sleep(0.02)

    @property
    def log(self) -> Path:
        """The output of all its runs."""
        return self.directory / "log.txt"

    def losses(self) -> list[str]:
        """The lines of its loss log, one for each update: number and loss."""
        file = self.directory / "losses.txt"
        return file.read_text().splitlines() if file.exists() else []

    def require(self, holds: bool, otherwise: str) -> None:
        """Stop the demo and show the end of the log unless the condition holds."""
        if not holds:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"{self.directory}: {otherwise}. The end of its log:\n{tail}")


def preempt(training: Training, after_update: int) -> int:
    """Start it, ask it to leave in the middle, and check that it does.

    Returns:
        The step that it saved before it left.
    """
    training.start()
    training.wait_for_update(after_update)
    assert training.process is not None
    training.process.send_signal(signal.SIGTERM)
    training.wait(PREEMPTED_CODE)
    done, saved = len(training.losses()), jct.StepManager(training.checkpoints).latest
    training.require(0 < done < training.steps, f"{done} of {training.steps} updates were done: that is no middle")
    training.require(saved == done, f"{done} updates were done, and step {saved} is the last one saved")
    return done


def what_is_left(training: Training) -> dict[str, Leaves]:
    """Return everything that must be equal, as bytes: the parts of the last checkpoint, and every loss."""
    step = jct.StepManager(training.checkpoints).path(training.steps)
    state = jct.load(step)
    return {
        "parameters": leaves_of(state["params"]),
        "optimizer state": leaves_of(state["opt_state"]),
        "PRNG key": leaves_of(state["key"]),
        "step": leaves_of(state["step"]),
        "data position": files_in(f"{step}/data"),
        "losses": {f"line {number}": line.encode() for number, line in enumerate(training.losses(), 1)},
    }


def files_in(folder: str) -> Leaves:
    """Return the content of each file in a folder, or of each object below a URL."""
    if "://" not in folder:
        return {f"data/{file.name}": file.read_bytes() for file in Path(folder).glob("*")}
    import obstore
    from obstore.store import from_url

    store = from_url(folder)
    names = [found["path"] for page in obstore.list(store) for found in page]
    return {f"data/{name}": bytes(obstore.get(store, name).bytes()) for name in names}


def leaves_of(tree: object) -> Leaves:
    """Return the bytes of each leaf of a tree, by its path, dtype and shape."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves[f"{name} {array.dtype}{list(array.shape)}"] = array.tobytes()
    return leaves


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One part of two trainings: its leaves and bytes in the first, digests of both, and which leaves differ."""

    part: str
    leaves: int
    bytes: int
    digests: tuple[str, str]
    different: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both have leaves, and all of them are equal."""
        return self.leaves > 0 and not self.different


def compare(first: Mapping[str, Leaves], second: Mapping[str, Leaves]) -> list[Comparison]:
    """Compare byte for byte, part by part; a leaf of only one side is a difference."""
    found = []
    for part in sorted(first.keys() | second.keys(), key=[*first, *second].index):
        a, b = first.get(part, {}), second.get(part, {})
        different = tuple(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))
        size = sum(map(len, a.values()))
        found.append(Comparison(part, len(a), size, (digest(a), digest(b)), different))
    return found


def digest(leaves: Leaves) -> str:
    """The first 12 digits of the SHA-256 of all names and bytes."""
    whole = hashlib.sha256()
    for name, content in sorted(leaves.items()):
        whole.update(f"{name} {len(content)} ".encode() + content)
    return whole.hexdigest()[:12]


def show(console: Console, comparisons: list[Comparison]) -> None:
    """The comparison as a table."""
    table = Table("part", "leaves", "bytes", "preempted", "left alone", "bytes are", title="SHA-256 of what is left")
    for one in comparisons:
        verdict = "[green]equal[/]" if one.equal else f"[red]NOT EQUAL[/]: {', '.join(one.different[:3]) or 'nothing'}"
        table.add_row(one.part, f"{one.leaves:,}", f"{one.bytes:,}", *one.digests, verdict)
    console.print(table)


def check_pieces(training: Training, starts: list[int]) -> None:
    """Stop the demo unless each run starts where the previous one ended, and each update was done exactly once."""
    log = training.log.read_text().splitlines()
    found = [int(line.split()[2]) for line in log if line.startswith("starting after ")]
    training.require(found == starts, f"its runs started after {found}, expected {starts}")
    updates = [line.split()[0] for line in training.losses()]
    every = [str(number) for number in range(1, training.steps + 1)]
    training.require(updates == every, "an update is missing or was done twice")


def run(console: Console, preempted: Training, alone: Training, preemptions: int) -> bool:
    """Train in both ways and compare; returns whether all is equal."""
    alone.start()
    starts = [0]
    for number in range(1, preemptions + 1):
        starts.append(preempt(preempted, preempted.steps * number // (preemptions + 1)))
        console.print(f"SIGTERM: step {starts[-1]} is saved, exit code {PREEMPTED_CODE}. The same command again.")
    preempted.start()
    preempted.wait(0)
    alone.wait(0)
    check_pieces(preempted, starts)
    check_pieces(alone, [0])
    console.print(f"Both are done. One ran in {len(starts)} pieces; no update was lost or done twice.")
    comparisons = compare(what_is_left(preempted), what_is_left(alone))
    show(console, comparisons)
    return all(one.equal for one in comparisons)


@contextlib.contextmanager
def object_server(url: str) -> Iterator[str]:
    """Serve S3 on this machine if this is its URL and the environment names no endpoint; yields what is used."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    if not url.startswith("s3://") or endpoint:
        yield endpoint or "the endpoint of the environment"
        return
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.support.objects.servers import Moto

    with Moto() as server:
        bucket = url.split("/")[2]
        urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/{bucket}", method="PUT")).close()
        os.environ.update(server.environment())
        yield f"{server.name}, a server on this machine"


def main() -> int:
    """Run the demo; the exit code is 0 only if everything is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="updates of each training")
    parser.add_argument("--preemptions", type=int, default=2, help="how often one of them is preempted")
    parser.add_argument("--directory", help="a new one, or a URL, which is kept; none: a temporary one")
    arguments = parser.parse_args()
    url = arguments.directory.rstrip("/") if "://" in (arguments.directory or "") else ""
    if arguments.directory is not None and not url and Path(arguments.directory).exists():
        parser.error(f"{arguments.directory} exists; name a new one")
    console, began = Console(soft_wrap=True), time.monotonic()
    names = "preempted", "left-alone"
    with tempfile.TemporaryDirectory() as temporary, object_server(url) as server:
        directory = Path(temporary if url else arguments.directory or temporary).absolute()
        places = [f"{url}/{name}" if url else "" for name in names]
        if any(jct.StepManager(place).latest is not None for place in places if place):
            parser.error(f"{url} has checkpoints; name a new one")
        preempted, alone = (
            Training(directory / name, arguments.steps, at) for name, at in zip(names, places, strict=True)
        )
        where = f"{url} on {server}" if url else directory
        console.print(f"Two trainings of {arguments.steps} updates below {where}; one of them will be preempted.")
        try:
            equal = run(console, preempted, alone, arguments.preemptions)
        finally:
            preempted.stop()
            alone.stop()
    console.print(f"{'Everything is equal' if equal else 'NOT EVERYTHING IS EQUAL'}, {time.monotonic() - began:.0f} s.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
