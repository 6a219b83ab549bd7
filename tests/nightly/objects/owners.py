"""Racing and stopped owners of runs on object stores: `python -m tests.nightly.objects.owners [--rounds N]`.

In each round several managers want one run, which is new or has a dead owner: one of them gets it. A stopped owner is
held at a request of a save, or by SIGSTOP, until another one has taken over: it must not commit anything.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec
import obstore
from obstore.store import ObjectStore

from jaxckpt_train.errors import CheckpointError, DirectoryLockedError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.settings import ObjectStoreSettings, StoreSettings
from jaxckpt_train.store.backends.by_path import ByPath
from tests.nightly.crash.facts import state_of, token_of
from tests.nightly.objects.crashes import quiet
from tests.support.objects.access import Access
from tests.support.objects.faults import Request
from tests.support.objects.runs import DEAD_PID, LOCK, Held
from tests.support.objects.servers import Moto, RealServer, VersityGw
from tests.support.objects.stand_in import StandIn

OWNERS = 8
LONGEST_S = 60.0
EXIT_REFUSED = 3
SERVERS: dict[str, type[RealServer]] = {"versitygw": VersityGw, "moto": Moto}


@dataclasses.dataclass
class Found:
    """How many rounds there were, and what went wrong."""

    rounds: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def settings_for(access: Access) -> StoreSettings:
    """Return settings without a grace period and probes."""
    options = {name: value for name, value in access.options().items() if name not in ("endpoint", "allow_http")}
    chosen = ObjectStoreSettings(
        endpoint=access.endpoint, options=options, delete_grace_s=0.0, check_conditions=False, retries=2
    )
    return StoreSettings(object_store=chosen, staging_bytes=1 << 20)


def opened(access: Access, run: str) -> StepManager:
    """Open a run with a backend of its own, as another process has it."""
    settings = settings_for(access)
    return StepManager(access.url(run), settings=settings, backend=ByPath(settings.object_store))


def bury(store: ObjectStore, run: str) -> None:
    """Make the owner of a run a dead process of this machine."""
    key = f"{run}/{LOCK}"
    head, _, body = bytes(obstore.get(store, key).bytes()).partition(b"\n")
    lock = json.loads(body)
    lock["process"] |= {"pid": DEAD_PID, "nonce": ""}
    obstore.put(store, key, head + b"\n" + msgspec.json.encode(lock), use_multipart=False)


def abandon(manager: StepManager) -> None:
    """End a manager as SIGKILL ends its process."""
    manager._run._lock._stop.open()
    manager._run._lock._tried = False


def race(access: Access, rounds: int, seed: int = 0) -> Found:
    """Let several managers own each of many runs at the same time; half of the runs have a dead owner."""
    found, chance, store = Found(), random.Random(seed), access.store()
    with concurrent.futures.ThreadPoolExecutor(OWNERS) as pool:
        for number in range(rounds):
            run = f"race-{seed}-{number}"
            if chance.random() < 0.5:
                dead = opened(access, run)
                dead.own()
                abandon(dead)
                bury(store, run)
            managers, barrier = [opened(access, run) for _ in range(OWNERS)], threading.Barrier(OWNERS)
            outcomes = list(pool.map(lambda manager, at=barrier: _try_to_own(manager, at), managers))
            found.rounds += 1
            found.problems += [f"{run}: {each}" for each in _problems_of_race(managers, outcomes)]
            for manager in managers:
                manager.close()
    return found


def _try_to_own(manager: StepManager, barrier: threading.Barrier) -> CheckpointError | None:
    barrier.wait()
    try:
        manager.own()
    except CheckpointError as error:
        return error
    return None


def _problems_of_race(managers: Sequence[StepManager], outcomes: Sequence[CheckpointError | None]) -> list[str]:
    winners = [each for each, error in zip(managers, outcomes, strict=True) if error is None]
    problems = [f"{type(error).__name__}: {error}" for error in outcomes if not isinstance(error, DirectoryLockedError)]
    problems = [each for each in problems if not each.startswith("NoneType")]
    if len(winners) != 1:
        return [*problems, f"{len(winners)} winners"]
    winners[0].save(1, state_of(1))
    winners[0].wait(LONGEST_S)
    loser = next(each for each in managers if each is not winners[0])
    with contextlib.suppress(DirectoryLockedError):
        loser.save(2, state_of(2))
        loser.wait(LONGEST_S)
        problems.append("a loser has saved")
    return problems


def races_of_puts(access: Access, rounds: int) -> int:
    """Return in how many rounds other than one of several bare conditional puts succeeded: the server's own fault."""
    store, wrong = access.store(), 0

    def put(key: str, number: int, barrier: threading.Barrier) -> bool:
        barrier.wait()
        try:
            obstore.put(store, key, b"%d" % number, mode="create", use_multipart=False)
        except Exception:  # noqa: BLE001  # any refusal
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(OWNERS) as pool:
        for number in range(rounds):
            barrier = threading.Barrier(OWNERS)
            done = [pool.submit(put, f"puts/{number}", each, barrier) for each in range(OWNERS)]
            wrong += sum(each.result() for each in done) != 1
    return wrong


class HeldAt(Held):
    """Hold the n-th request from now on."""

    def __init__(self, number: int) -> None:
        self._left = number
        super().__init__(self._is_it)

    def _is_it(self, request: Request) -> bool:
        self._left -= 1
        return self._left == 0


def stopped(server: StandIn, trials: int) -> Found:
    """Hold an owner at each request of a save in turn, let another one take over, and wake it."""
    found, at, runs = Found(), 0, itertools.count()
    while found.rounds < trials:
        at += 1
        problems = _stop_once(server, f"stopped-{next(runs)}", at)
        if problems is None:  # the save has fewer requests
            at = 0
            continue
        found.rounds += 1
        found.problems += [f"held at request {at} of a save: {each}" for each in problems]
    return found


def _stop_once(server: StandIn, run: str, at: int) -> list[str] | None:
    """Return what a stopped owner did wrong; None: its save has fewer requests."""
    first, second = opened(server.access, run), opened(server.access, run)
    first.save(1, state_of(1))
    first.wait(LONGEST_S)
    first._run._deleter.wait(LONGEST_S)
    server.faults = held = HeldAt(at)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        saving = pool.submit(_save, first, 2)
        while not held.reached.wait(0.05):
            if saving.done():
                server.faults = None
                first.close()
                return None
        bury(server.access.store(), run)
        second.restore()
        second.save(5, state_of(5))
        second.wait(LONGEST_S)
        before = opened(server.access, run).steps
        held.release.set()
        saving.result()
    server.faults = None
    problems = _problems_after(server.access, run, before)
    if not isinstance(_save(first, 9), DirectoryLockedError):
        problems.append("its later save was not refused")
    second.save(6, state_of(6))
    second.wait(LONGEST_S)
    second.close()
    first.close()
    return problems + _problems_after(server.access, run, [*before, 6])


def _save(manager: StepManager, step: int) -> CheckpointError | None:
    try:
        manager.save(step, state_of(step))
        manager.wait(LONGEST_S)
    except CheckpointError as error:
        return error
    return None


def _problems_after(access: Access, run: str, expected: Sequence[int]) -> list[str]:
    reader = opened(access, run)
    problems = [] if reader.steps == expected else [f"it has steps {reader.steps}, expected {expected}"]
    return problems + [f"step {each} has other content" for each in reader.steps if _token(reader, each) != each]


def _token(reader: StepManager, step: int) -> int:
    return token_of(reader.load(step=step))


def stopped_processes(access: Access, trials: int, seed: int = 0) -> Found:
    """Stop a process by SIGSTOP while it saves, let another one take over, and wake it."""
    found, chance = Found(), random.Random(seed)
    for number in range(trials):
        run = f"process-{number}"
        command = [sys.executable, "-m", "tests.nightly.objects.owners", "--child", run]
        shown = json.dumps(dataclasses.asdict(access))
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OWNERS_ACCESS": shown}
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()  # it has saved a step
            time.sleep(chance.random() * 0.3)
            child.send_signal(signal.SIGSTOP)
            bury(access.store(), run)
            second = opened(access, run)
            token = token_of(second.restore())
            second.save(token + 1000, state_of(token + 1000))
            second.wait(LONGEST_S)
            before = opened(access, run).steps
            child.send_signal(signal.SIGCONT)
            code = child.wait(LONGEST_S)
        found.rounds += 1
        problems = _problems_after(access, run, before)
        if code != EXIT_REFUSED:
            problems.append(f"it ended with {code}")
        found.problems += [f"{run}: {each}" for each in problems]
        second.close()
    return found


def _child(run: str) -> None:
    """Save steps until a save is refused."""
    access = Access(**json.loads(os.environ["OWNERS_ACCESS"]))
    manager = opened(access, run)
    for step in range(1, 1000):
        if isinstance(_save(manager, step), DirectoryLockedError):
            os._exit(EXIT_REFUSED)
        print(step, flush=True)
    os._exit(1)


def _report(what: str, found: Found) -> bool:
    print(f"{what}: {found.rounds} rounds, {len(found.problems)} problems", flush=True)
    for problem in found.problems[:5]:
        print(f"  {problem}")
    return bool(found.problems)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--stops", type=int, default=100, help="owners held at a request")
    parser.add_argument("--processes", type=int, default=5, help="owners stopped by a signal, on each server")
    parser.add_argument("--servers", nargs="*", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    gc.freeze()
    failed = False
    with quiet():
        if chosen.child:
            _child(chosen.child)
        with StandIn("s3") as server:
            failed |= _report("stand-in, owners held", stopped(server, chosen.stops))
            failed |= _report("stand-in, race", race(server.access, chosen.rounds))
            failed |= _report("stand-in, processes", stopped_processes(server.access, chosen.processes))
        for name in chosen.servers:
            missing = SERVERS[name].install()
            if missing is not None:
                print(f"{name}: SKIP: {missing}")
                continue
            with SERVERS[name]() as real:
                wrong = races_of_puts(real.access, chosen.rounds)
                print(f"{name}: bare puts raced wrongly in {wrong} of {chosen.rounds} rounds", flush=True)
                raced = _report(f"{name}, race", race(real.access, chosen.rounds))
                failed |= raced and not wrong
                failed |= _report(f"{name}, processes", stopped_processes(real.access, chosen.processes))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
