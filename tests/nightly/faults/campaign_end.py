"""The end of a campaign on the command line: print the problems, and exit with a matching code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from tests.nightly.faults.needs import SKIPPED

MOST_SHOWN = 20


def leave_with(problems: Sequence[str], started: float, seed: int | None = None) -> NoReturn:
    """Print the problems and the seconds since `started` (of `time.monotonic`), and end the process.

    Raises:
        SystemExit: with 1 if there is a problem, otherwise with 0.
    """
    seeded = "" if seed is None else f", seed {seed}"
    print(f"{len(problems)} problems; {time.monotonic() - started:.0f} s{seeded}")
    for problem in problems[:MOST_SHOWN]:
        print(f"  {problem}")
    raise SystemExit(bool(problems))


def those_that_can(parts: Iterable[str], why_not: Callable[[str], str | None]) -> list[str]:
    """Return the parts of a campaign that can run here; print the others with the reason.

    Raises:
        SystemExit: no part can run.
    """
    reasons = {part: why_not(part) for part in parts}
    for part, reason in reasons.items():
        if reason is not None:
            print(f"{part}: SKIP: {reason}", flush=True)
    able = [part for part, reason in reasons.items() if reason is None]
    if not able:
        raise SystemExit(SKIPPED)
    return able
