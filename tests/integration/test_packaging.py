"""What is installed: the public names, what an import costs, and the wheel with its presets and Hydra plugin."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jaxckpt_train

# Packages that only an adapter imports, when it is used.
OPTIONAL = (
    "blake3", "bokeh", "flax", "grain", "hydra", "jinja2", "keras", "obstore", "omegaconf", "opentelemetry", "optax",
    "orbax", "prometheus_client", "tensorstore", "torch", "typer",
)  # fmt: skip
MOST_IMPORT_S = 0.15


def test_all_is_what_is_public() -> None:
    assert sorted(dir(jaxckpt_train)) == sorted(set(jaxckpt_train.__all__))
    assert [name for name in jaxckpt_train.__all__ if getattr(jaxckpt_train, name, None) is None] == []


def test_stub_has_the_names_of_the_package() -> None:
    stub = ast.parse(Path(jaxckpt_train.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    seen = {str(alias.asname): str(node.module) for node in imports for alias in node.names}
    assert sorted(seen) == sorted(jaxckpt_train.__all__)
    for name, module in seen.items():
        assert getattr(jaxckpt_train, name) is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        jaxckpt_train.no_such_name  # noqa: B018 - reading the attribute is the test


def test_no_module_hides_a_public_name(repo_root: Path) -> None:
    # Importing the module jaxckpt_train.x replaces the attribute jaxckpt_train.x.
    modules = {entry.stem for entry in (repo_root / "jaxckpt_train").iterdir()}
    assert modules & set(jaxckpt_train.__all__) == {"errors", "testing"}
    assert jaxckpt_train.testing is importlib.import_module("jaxckpt_train.testing")


def test_errors_need_no_import_of_their_own(run_python) -> None:
    program = "import jaxckpt_train as jct; assert jct.errors.SettingsError is jct.SettingsError"
    run_python(program, check=True, fresh=True)


def test_public_names_have_docstrings() -> None:
    values = {name: getattr(jaxckpt_train, name) for name in jaxckpt_train.__all__}
    assert [name for name, value in values.items() if callable(value) and not (value.__doc__ or "").strip()] == []


def test_import_loads_no_optional_package(run_python) -> None:
    program = "import sys, json, jaxckpt_train; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    loaded = json.loads(run_python(program, check=True, fresh=True).stdout)
    assert [name for name in OPTIONAL if name in loaded] == []


def test_import_touches_no_device(run_python) -> None:
    program = """
import jaxckpt_train
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run_python(program, check=True, fresh=True).stdout.split() == ["False"]


def test_import_costs_little_compared_with_jax(run_python) -> None:
    program = """
import time, jax
begin = time.perf_counter()
import jaxckpt_train
print(time.perf_counter() - begin)
"""
    # The fastest of several: noise of the machine only ever adds.
    assert any(float(run_python(program, check=True, fresh=True).stdout) < MOST_IMPORT_S for _ in range(5))


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, repo_root)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing in it but the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    _pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_wheel_holds_package_its_presets_and_its_plugin(wheel: Path, repo_root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [*(repo_root / "jaxckpt_train").rglob("*.py"), *(repo_root / "jaxckpt_train").rglob("*.pyi")]
    report = repo_root / "jaxckpt_train" / "report"
    sources += [file for kind in ("*.css", "*.html", "*.js") for file in report.glob(kind)]
    here = {str(file.relative_to(repo_root)) for file in sources}
    presets = {f"jaxckpt_train/{file.relative_to(repo_root)}" for file in (repo_root / "configs").rglob("*.yaml")}
    wanted = here | presets | {"jaxckpt_train/py.typed", "hydra_plugins/jaxckpt_train_plugin.py"}
    wanted -= {"jaxckpt_train/integrations/hydra_search_path.py"}  # installed as the one in hydra_plugins
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_pytest_finds_the_fixture_of_the_installed_wheel(installed: Path, run_python, tmp_path: Path) -> None:
    program = "import pytest, sys; sys.exit(pytest.main(['--fixtures', '-q', '-p', 'no:cacheprovider', '.']))"
    done = run_python(program, cwd=tmp_path, path=[installed], fresh=True)
    assert "resume_proof -- " in done.stdout, done.stdout + done.stderr


def test_an_app_elsewhere_uses_the_installed_presets(installed: Path, run_python, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        """
import hydra, jaxckpt_train
from jaxckpt_train.config import callback_arguments

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    print(jaxckpt_train.__file__)
    print(callback_arguments(cfg.checkpoint)["keep_latest"])

main()
"""
    )
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("defaults:\n  - checkpoint: preemptible\n  - _self_\n")
    done = run_python(app, cwd=tmp_path, path=[installed], check=True, fresh=True)
    assert done.stdout.splitlines() == [str(installed / "jaxckpt_train" / "__init__.py"), "2"]
    assert done.stderr == ""
