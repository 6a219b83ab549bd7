"""Orbax's public tests of its `CheckpointManager`, run with the manager of this package: `make orbax-manager-tests`.

Its file `checkpoint_manager_test.py` is not part of this repository: give its path, or have it in the installed Orbax.
The exit code is 77 without the file, and 1 if fewer tests pass than `PASSING`.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import inspect
import json
import re
import socket
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

PASSING = 118
"""The number of tests of orbax-checkpoint 0.12.4 that pass."""
NAME = "checkpoint_manager_test.py"
TIME_LIMIT_S = 1800
# The reasons why a test cannot pass, by a pattern in its text or its parameters; the first match counts.
REASONS = {
    "privates of Orbax": r"manager\._(checkpointer|maybe)|_on_commit_callback|'_save_step_metadata'|'finalize'"
    r"|broadcast_one_to_all",
    "files of Orbax": r"step_lib\.(is_path|all_temp)|metadata_lib\.step|COMMIT_SUCCESS|test_file_format",
    "telemetry of Orbax": r"record_scalar",
}


def find_file(given: str | None) -> Path | None:
    """Return the file with the tests: the given one, that of the installed package, or None."""
    if given is not None:
        return Path(given) if Path(given).is_file() else None
    spec = importlib.util.find_spec("orbax.checkpoint")
    found = [Path(folder) / NAME for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((path for path in found if path.is_file()), None)


def reason_of(text: str) -> str:
    """Return the reason why a test with this text fails."""
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, text)), "other")


def run(path: Path, only: str) -> dict[str, dict[str, str]]:
    """Run the tests in this process.

    Args:
        path: of the file.
        only: a regular expression that the names of the tests have to match.

    Returns:
        By the name of each test its `result`, the `reason` that its text shows, and the `error`.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    jax.distributed.initialize(address, num_processes=1, process_id=0)
    module = _with_this_manager(path)
    found: dict[str, dict[str, str]] = {}
    for test in unittest.defaultTestLoader.loadTestsFromTestCase(module.CheckpointManagerTest):
        name = test.id().partition(".CheckpointManagerTest.")[2]
        if re.search(only, name) is None:
            continue
        result = unittest.TestResult()
        test.run(result)
        errors = [text for _, text in [*result.errors, *result.failures]]
        outcome = "skipped" if result.skipped else "failed" if errors else "passed"
        text = _text_of(module, name)
        found[name] = {"result": outcome, "reason": text, "error": "".join(errors)}
        print(outcome, name, file=sys.stderr, flush=True)
    return found


def _text_of(module: Any, name: str) -> str:
    """Return the text of a test, or the common text of parametrised tests."""
    texts = re.split(r"\n(?=  (?:def|@))", inspect.getsource(module))
    named = {found[1]: text for text in texts if (found := re.match(r"  def (test_\w+)", text))}
    return named.get(max((each for each in named if name.startswith(each)), key=len, default=""), "")


def _with_this_manager(path: Path) -> Any:
    """Return the module of the tests, with the manager, options and args of this package."""
    import orbax.checkpoint
    from absl import flags
    from absl.testing import absltest
    from orbax.checkpoint import args, checkpoint_manager, test_utils  # noqa: F401
    from orbax.checkpoint._src import checkpointers, metadata

    from jaxckpt_train.integrations import orbax_manager
    from tests.support.orbax_shim import ObservedManager, checkpointer_of

    class MultiProcessTest(absltest.TestCase):
        """Replaces the base class for multi-process jobs, which no package of Orbax contains."""

        def multiprocess_create_tempdir(self, name: str) -> str:
            return self.create_tempdir(name).full_path

        def assertRaisesRegex(self, expected: Any, regex: Any, *given: Any, **more: Any) -> Any:  # noqa: N802
            """Check the class of an error, but not its message."""
            return super().assertRaisesRegex(expected, "", *given, **more)  # noqa: PT027

    testing = types.ModuleType("orbax.checkpoint._src.testing.multiprocess_test")
    testing.MultiProcessTest = MultiProcessTest  # type: ignore[attr-defined]
    sys.modules[testing.__name__] = testing
    importlib.import_module("orbax.checkpoint._src.testing").multiprocess_test = testing
    flags.FLAGS([str(path), f"--test_tmpdir={tempfile.mkdtemp()}"])
    _module_of(path)  # so that its imports are done with the real names
    ours = {**_public(orbax_manager), "CheckpointManager": ObservedManager}
    theirs_with_our_args = {"Checkpointer": checkpointer_of(checkpointers.checkpointer.Checkpointer, args)}
    replaced = [
        (checkpointers, "checkpointer", theirs_with_our_args),
        (orbax.checkpoint, "args", _public(orbax_manager.args)),
        (orbax.checkpoint, "checkpoint_manager", ours),
        (metadata, "checkpoint", ours),
    ]
    theirs = [getattr(package, name) for package, name, _ in replaced]
    try:
        for (package, name, values), module in zip(replaced, theirs, strict=True):
            mixed = types.ModuleType(module.__name__)
            names = {each: value for each, value in vars(module).items() if not each.startswith("__")}
            vars(mixed).update(names | {each: value for each, value in values.items() if each in names})
            setattr(package, name, mixed)
        return _module_of(path)
    finally:
        for (package, name, _), module in zip(replaced, theirs, strict=True):
            setattr(package, name, module)


def _public(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("checkpoint_manager_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Run the tests in a new process and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", help=f"of {NAME}; not given: that of the installed Orbax")
    parser.add_argument("--only", default="", help="a regular expression for the names of tests")
    parser.add_argument("--errors", action="store_true", help="print the errors in full")
    parser.add_argument("--into", help="run them in this process, and write the results into this file")
    given = parser.parse_args()
    path = find_file(given.path)
    if path is None:
        print(f"SKIP: there is no {NAME} at {given.path or 'the installed Orbax'}")
        return 77
    if given.into is not None:
        Path(given.into).write_text(json.dumps(run(path, given.only)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.json"
        command = [sys.executable, "-m", "tests.nightly.integrations.orbax_manager_suite", str(path)]
        subprocess.run([*command, "--only", given.only, "--into", str(into)], check=True, timeout=TIME_LIMIT_S)
        found = json.loads(into.read_text())
    return report(found, prints_errors=given.errors, is_whole=not given.only)


def report(found: dict[str, dict[str, str]], *, prints_errors: bool, is_whole: bool) -> int:
    """Print the counts and the failed tests."""
    failed = {name: each for name, each in found.items() if each["result"] == "failed"}
    for name, each in failed.items():
        last = each["error"].strip().splitlines()[-1]
        print(f"{reason_of(name + each['reason'])}: {name}: {each['error'] if prints_errors else last[:200]}")
    counts = collections.Counter(each["result"] for each in found.values())
    reasons = collections.Counter(reason_of(name + each["reason"]) for name, each in failed.items())
    print(f"{len(found)} tests: {dict(sorted(counts.items()))}; of those that fail: {dict(sorted(reasons.items()))}")
    return int(is_whole and counts["passed"] < PASSING)


if __name__ == "__main__":
    sys.exit(main())
