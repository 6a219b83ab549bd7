"""Many real versions of Orbax: their checkpoints are loaded, and they restore our exports: `make orbax-versions`.

Each version has its own environment below build/, which takes about 400 MB and is kept. A version whose Python is not
on the machine is skipped with a line that says so. The exit code is 1 if a checkpoint was not loaded equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax

import jaxckpt_train as jct
from tests.support.commands import json_of
from tests.support.orbax_golden import assert_item, blank, expected_items, path_of
from tests.support.paths import REPO_ROOT
from tests.support.same_trees import assert_same

ROOT = REPO_ROOT
SCRIPTS = ROOT / "tests" / "golden"


class Version(NamedTuple):
    """A version of Orbax, its Python, the packages that it needs, and whether it restores exports."""

    orbax: str
    python: str
    needs: str
    restores: bool = True


VERSIONS = [
    Version(
        "0.1.8",
        "3.9",
        "jax==0.4.13 jaxlib==0.4.13 flax==0.6.9 numpy<2 scipy<1.13 tensorstore<0.1.40 ml_dtypes<0.3",
        False,
    ),
    Version(
        "0.2.7",
        "3.9",
        "jax==0.4.13 jaxlib==0.4.13 flax==0.7.0 numpy<2 scipy<1.13 tensorstore<0.1.42 ml_dtypes<0.3",
        False,
    ),
    Version(
        "0.3.5",
        "3.9",
        "jax==0.4.18 jaxlib==0.4.18 flax==0.7.2 numpy<2 scipy<1.13 tensorstore<0.1.46 ml_dtypes<0.3",
        False,
    ),
    Version("0.4.8", "3.10", "jax==0.4.23 jaxlib==0.4.23 flax==0.7.5 numpy<2 scipy<1.13 tensorstore<0.1.52", False),
    Version("0.5.23", "3.10", "jax==0.4.30 jaxlib==0.4.30 flax==0.8.5 numpy<2 tensorstore<0.1.64"),
    Version("0.6.4", "3.10", "jax==0.4.33 jaxlib==0.4.33 flax==0.9.0 numpy<2.1 tensorstore<0.1.67"),
    Version("0.7.0", "3.11", "jax==0.4.34 jaxlib==0.4.34 flax==0.10.0 numpy<2.2 tensorstore<0.1.68"),
    Version("0.9.1", "3.11", "jax==0.4.35 jaxlib==0.4.35 flax==0.10.1 numpy<2.2 tensorstore<0.1.70"),
    Version("0.10.3", "3.11", "jax==0.4.38 jaxlib==0.4.38 flax==0.10.2 numpy<2.2 tensorstore<0.1.72"),
    Version("0.11.0", "3.11", "jax==0.5.0 jaxlib==0.5.0 flax==0.10.3 numpy<2.3 tensorstore<0.1.73"),
    Version("0.11.40", "3.11", "jax==0.8.0 jaxlib==0.8.0 flax==0.12.0 numpy<2.4"),
    Version("0.12.8", "3.11", "jax==0.10.2 jaxlib==0.10.2 flax==0.12.8"),
]


def interpreter(version: str) -> str | None:
    """Return a Python of this version that runs, or None."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (f"python{version}", *map(str, homes)):
        command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if shutil.which(candidate) is not None:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                return candidate
    return None


def environment(version: Version, folder: Path) -> str | None:
    """Return the Python of an environment with this version, which is made if necessary, or None if that fails."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    needs = [f"orbax-checkpoint=={version.orbax}", *version.needs.split()]
    if stamp.exists() and stamp.read_text() == " ".join(needs):
        return str(python)
    found = interpreter(version.python)
    if found is None:
        print(f"{version.orbax}: SKIP: needs Python {version.python}", flush=True)
        return None
    print(f"{version.orbax}: making {folder}", flush=True)
    subprocess.run([found, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *needs]
    if subprocess.run(pip, check=False).returncode != 0:
        print(f"{version.orbax}: SKIP: it cannot be installed", flush=True)
        return None
    stamp.write_text(" ".join(needs))
    return str(python)


def run_script(python: str, script: str, *arguments: str | Path) -> list[str]:
    """Run a script in an environment without this package, and return the lines that it prints."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX", "XLA"))}
    command = [python, str(SCRIPTS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def problem_of(form: Path) -> str | None:
    """Load a form, and return what is wrong with the result, or None."""
    expected = expected_items(form)
    try:
        found = jct.load_checkpointables(path_of(form))
        names = dict(zip(expected, found, strict=True)) if len(expected) == 1 else {name: name for name in expected}
        for name, item in expected.items():
            value = found[names[name]]
            if form.name == "array" and isinstance(value, dict):
                value = value["checkpoint"]
            assert_item(jax.random.key_data(value) if name == "typed" else value, item, name)
            if not isinstance(item, jct.JsonValue) and form.name not in ("keys", "array"):
                target = {names[name]: jax.tree.map(blank, item)}
                assert_same(jct.load_checkpointables(path_of(form), target)[names[name]], item)
    except (AssertionError, KeyError, jct.CheckpointError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def restored_ways(python: str, form: Path, folder: Path) -> list[str]:
    """Return the classes by which a version restores our export of one of its own states, byte for byte."""
    tree = expected_items(form)["state"]
    shutil.rmtree(folder, ignore_errors=True)
    jct.save(folder / "ours", tree)
    json_of("export", folder / "ours", folder / "run" / "12", "--to", "orbax")
    state = {"state": json.loads((form / "expected.json").read_text(encoding="utf-8"))["state"]}
    (folder / "expected.json").write_text(json.dumps(state))
    lines = run_script(python, "restore_orbax.py", folder / "run" / "12", folder / "expected.json")
    return [line.partition(":")[0] for line in lines if line.endswith(": restored")]


def row_of(version: Version, python: str, folder: Path, seed: int) -> tuple[str, int]:
    """Return a line of the table, and how many forms were not loaded equal."""
    shutil.rmtree(folder, ignore_errors=True)
    run_script(python, "make_orbax.py", folder / "saved", "--large", "--seed", str(seed))
    forms = sorted(path.parent for path in folder.glob("saved/*/expected.json"))
    problems = {form.name: found for form in forms if (found := problem_of(form)) is not None}
    read = ", ".join(form.name for form in forms if form.name not in problems)
    ways = restored_ways(python, folder / "saved" / "default", folder / "export")
    if bool(ways) != version.restores:
        problems["export"] = f"expected that it restores an export: {version.restores}, found {ways}"
    for name, problem in problems.items():
        print(f"{version.orbax}: {name}: {problem}", flush=True)
    return f"| {version.orbax} | {read} | {', '.join(ways) or '-'} |", len(problems)


def main() -> int:
    """Try all versions, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "orbax-versions")
    parser.add_argument("--only", default="", help="versions, such as 0.2.7,0.12.8")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    chosen = [version for version in VERSIONS if version.orbax in (options.only or version.orbax).split(",")]
    print(f"seed {options.seed}", flush=True)
    lines, problems = ["| Orbax | loaded, of what it writes | restores an export |", "|---|---|---|"], 0
    for version in chosen:
        python = environment(version, options.folder.absolute() / version.orbax)
        if python is not None:
            line, count = row_of(version, python, options.folder.absolute() / "saved" / version.orbax, options.seed)
            print(line, flush=True)
            lines.append(line)
            problems += count
    (options.folder / "table.md").write_text("\n".join(lines) + "\n")
    print(f"{len(lines) - 2} versions of Orbax, {problems} problems")
    return 1 if problems or len(lines) == 2 else 0


if __name__ == "__main__":
    sys.exit(main())
