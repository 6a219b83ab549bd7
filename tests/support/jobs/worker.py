"""One process of a job in tests: joins the job, then makes the calls it receives until its input ends."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import traceback

import jax

from tests.support.jobs.namespaces import enter


def main() -> None:
    """Answer each line of the input with one line."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints must not become answers
    options = json.loads(sys.argv[1])
    namespace = options.pop("namespace", None)
    if namespace is not None:
        enter(namespace)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", options.pop("preemption_service", True))
    jax.distributed.initialize(**options)
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["call"].partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = {"value": function(*request["arguments"])}
        except BaseException as error:  # noqa: BLE001  # end of a process: the error goes to the test
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
