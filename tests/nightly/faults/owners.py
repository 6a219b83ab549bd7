"""Compare sequences of owners, readers, pins and deaths with a model.

`python -m tests.nightly.faults.owners --sequences 5000`
"""

from __future__ import annotations

import argparse
import logging
import time
import traceback

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.run.test_owners_model import Owners

STEPS = 25


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    chosen, started, problems = parser.parse_args(), time.monotonic(), 0
    logging.getLogger("jaxckpt_train").disabled = True
    wanted = settings(
        max_examples=chosen.sequences,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    try:
        run_state_machine_as_test(seed(chosen.seed)(Owners), settings=wanted)
    except Exception:  # noqa: BLE001  # any difference from the model
        traceback.print_exc()
        problems = 1
    took_s = time.monotonic() - started
    print(
        f"{chosen.sequences} sequences of up to {STEPS} steps; {problems} problems; {took_s:.0f} s, seed {chosen.seed}"
    )
    raise SystemExit(problems)


if __name__ == "__main__":
    main()
