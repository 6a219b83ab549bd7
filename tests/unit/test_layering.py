"""Rules that are read from the source: which layer imports which, what touches the disk, how long things are."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import graphlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.layers import (
    ADAPTERS,
    CORE,
    DISK_STDLIB,
    FORBIDDEN_FILES,
    FORBIDDEN_STDLIB,
    LAYERS,
    MAY_HAVE_ONE_IMPORTER,
    MAY_READ_A_PICKLE,
    MAY_TOUCH_THE_DISK,
    MAY_USE_FILE_SYSTEMS,
    MOST_FILES_OF_A_FOLDER,
    NUMPY_ON_DISK,
    OF_FILE_SYSTEMS,
    OS_PATH_WITHOUT_DISK,
    OS_WITHOUT_DISK,
    PATH_METHODS_ON_DISK,
    WITH_JAX,
)
from tests.support.paths import REPO_ROOT

PACKAGE = "jaxckpt_train"
ROOT = REPO_ROOT

MOST_LINES_OF_A_FILE = 700
MOST_LINES_OF_A_FUNCTION = 60
DEEPEST_FOLDER = 2


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its name below the package ("store.local", "__init__"), and its text."""

    name: str
    source: str
    is_folder: bool = False

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: its absolute name, the line, and whether it happens inside a function."""

    name: str
    line: int
    lazy: bool


def package_modules() -> dict[str, Module]:
    found = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = file.relative_to(ROOT / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"
        found[name] = Module(name, file.read_text(), is_folder=parts[-1] == "__init__")
    return found


MODULES = package_modules()


def imports_of(module: Module) -> Iterator[Import]:
    """All imports: at the top, in functions, under TYPE_CHECKING, relative ones, and import_module("...")."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                origin = _origin(module, child)
                yield from (Import(_submodule(origin, alias.name), child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
                if child.args and isinstance(child.args[0], ast.Constant):
                    yield Import(str(child.args[0].value), child.lineno, lazy)
            yield from visit(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    return visit(module.tree, lazy=False)


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of what a `from ... import` imports from."""
    if node.level == 0:
        return node.module or ""
    here = [PACKAGE] if module.name == "__init__" else [PACKAGE, *module.name.split(".")]
    folder = here if module.is_folder else here[:-1]
    return ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])


def _submodule(origin: str, name: str) -> str:
    """Return `origin.name` if that is a module of this package, else `origin`, for `from origin import name`."""
    inner = f"{origin}.{name}".removeprefix(f"{PACKAGE}.")
    return f"{PACKAGE}.{inner}" if origin.split(".")[0] == PACKAGE and inner in MODULES else origin


def _own_name(name: str) -> str | None:
    """The name below the package, or None for a module of another package."""
    top, _, rest = name.partition(".")
    return (rest or "__init__") if top == PACKAGE else None


def upward_imports(module: Module) -> list[str]:
    problems = []
    for found in imports_of(module):
        target = _own_name(found.name)
        if target is None:
            continue
        layer = target.partition(".")[0]
        same = layer == module.layer and layer != "__init__"
        if not same and LAYERS.index(layer) <= LAYERS.index(module.layer):
            problems.append(f"{module.name}:{found.line} imports {found.name}, which is no lower layer")
    return problems


def foreign_imports(module: Module) -> list[str]:
    problems = []
    for found in imports_of(module):
        top = found.name.partition(".")[0]
        if top in ADAPTERS:
            fine = bool({module.name, module.layer} & ADAPTERS[top])
        elif top in sys.stdlib_module_names:
            is_read = top == "pickle" and module.name in MAY_READ_A_PICKLE
            never = top in FORBIDDEN_STDLIB and not is_read
            fine = not never and (top not in DISK_STDLIB or module.name in MAY_TOUCH_THE_DISK)
        else:
            fine = top == PACKAGE or (top in CORE and not (top == "jax" and module.layer not in WITH_JAX))
        if not fine:
            problems.append(f"{module.name}:{found.line} must not import {found.name}")
    return problems


def disk_calls(module: Module) -> list[str]:
    if module.name in MAY_TOUCH_THE_DISK:
        return []
    uses = [node for node in ast.walk(module.tree) if isinstance(node, (ast.Attribute, ast.Call, ast.ImportFrom))]
    return [f"{module.name}:{node.lineno} touches the disk: {ast.unparse(node)}" for node in uses if _on_disk(node)]


def _on_disk(node: ast.Attribute | ast.Call | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in ("os", "os.path") and any(alias.name not in OS_WITHOUT_DISK for alias in node.names)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        owner, _, attribute = called.rpartition(".")
        return called == "open" or (owner in ("np", "numpy") and attribute in NUMPY_ON_DISK) or attribute == "tofile"
    owner = ast.unparse(node.value)
    if owner == "os":
        return node.attr not in OS_WITHOUT_DISK
    if owner == "os.path":
        return node.attr not in OS_PATH_WITHOUT_DISK
    return node.attr in PATH_METHODS_ON_DISK or (owner.startswith("Path(") and node.attr in ("open", "touch", "rename"))


def file_system_calls(module: Module) -> list[str]:
    if module.name in MAY_USE_FILE_SYSTEMS:
        return []
    uses = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and node.attr in OF_FILE_SYSTEMS]
    return [
        f"{module.name}:{node.lineno} uses what object stores lack: {ast.unparse(node)}"
        for node in uses
        if ast.unparse(node.value).endswith("backend")
    ]


def long_functions(module: Module) -> list[str]:
    problems = []
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > MOST_LINES_OF_A_FUNCTION:
                problems.append(f"{module.name}:{node.lineno} {node.name} has a body of {lines} lines")
    return problems


def import_cycle(modules: dict[str, Module]) -> list[str]:
    """The modules of one cycle of imports at the top of files, or nothing."""
    graph = {
        module.name: {
            target
            for found in imports_of(module)
            if not found.lazy and (target := _own_name(found.name)) in modules and target != module.name
        }
        for module in modules.values()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def offenders(problems_of: Callable[[Module], list[Any]]) -> dict[str, list[Any]]:
    """Return the problems of each module that has any."""
    return {name: problems for name, module in MODULES.items() if (problems := problems_of(module))}


def test_every_module_has_a_layer() -> None:
    unknown = {module.layer for module in MODULES.values()} - set(LAYERS)
    assert not unknown, f"name the layer of {sorted(unknown)} in LAYERS and in docs/"


def test_imports_point_down() -> None:
    assert offenders(upward_imports) == {}


def test_third_parties_are_imported_only_by_their_adapters() -> None:
    assert offenders(foreign_imports) == {}


def test_only_the_local_backend_touches_the_disk() -> None:
    assert offenders(disk_calls) == {}


def test_few_modules_use_what_object_stores_lack() -> None:
    assert offenders(file_system_calls) == {}
    assert file_system_calls(Module("run.catalog", "self._backend.rename(a, b)")) != []
    assert file_system_calls(Module("run.catalog", "names.append(name)")) == []


def test_functions_are_short() -> None:
    assert offenders(long_functions) == {}


def test_there_is_no_import_cycle() -> None:
    assert import_cycle(MODULES) == []


def importers(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return, for each module, which modules import it at the top of their files."""
    found: dict[str, set[str]] = {}
    for module in modules.values():
        for each in imports_of(module):
            target = _own_name(each.name)
            if not each.lazy and target in modules and target != module.name:
                found.setdefault(target, set()).add(module.name)
    return found


def test_a_module_with_one_importer_has_a_reason() -> None:
    lonely = {name for name, users in importers(MODULES).items() if len(users) == 1 and not MODULES[name].is_folder}
    assert lonely == set(MAY_HAVE_ONE_IMPORTER)


def test_folders_of_the_package_stay_small() -> None:
    folders = collections.Counter(
        file.parent.name for file in (ROOT / PACKAGE).rglob("*.py") if file.name != "__init__.py"
    )
    assert {name: count for name, count in folders.items() if count > MOST_FILES_OF_A_FOLDER} == {}


def source_files() -> list[Path]:
    folders = (PACKAGE, "tests", "benchmarks", "examples")
    return [file.relative_to(ROOT) for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def problems_of_file(file: Path) -> Iterator[str]:
    """Yield the rules about whole files that a file breaks."""
    text = (ROOT / file).read_text()
    if not ast.get_docstring(ast.parse(text)):
        yield "the first statement must say what the file is for"
    if text.count("\n") > MOST_LINES_OF_A_FILE:
        yield "split it"
    if file.name in FORBIDDEN_FILES:
        yield "name it by its job"
    root = 3 if file.parts[0] == "tests" else 2  # with the tier of a test, and the name of the file
    if len(file.parts) - root > DEEPEST_FOLDER:
        yield f"folders are at most {DEEPEST_FOLDER} deep"


def test_file_says_its_one_job_and_stays_small() -> None:
    files = source_files()
    assert len(files) > 500
    assert {str(file): problems for file in files if (problems := list(problems_of_file(file)))} == {}


# A check that cannot fail is a defect: these tests show what each check must find.


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("store.writer", "import jaxckpt_train.callback"),
        ("store.writer", "from jaxckpt_train.pytree.flatten import join"),
        ("store.writer", "from jaxckpt_train.pytree import flatten"),
        ("store.writer", "from jaxckpt_train import metadata"),
        ("store.writer", "from ..pytree.flatten import join"),
        ("store.writer", "from .. import callback"),
        ("store.writer", "def lazy():\n    from jaxckpt_train.checkpoint import save"),
        ("store.writer", "if TYPE_CHECKING:\n    from jaxckpt_train.checkpoint import save"),
        ("store.writer", "importlib.import_module('jaxckpt_train.manager')"),
        ("errors", "from jaxckpt_train.settings import StoreSettings"),
        ("manager", "import jaxckpt_train"),
    ],
)
def test_an_arrow_that_points_up_is_found(name: str, line: str) -> None:
    assert upward_imports(Module(name, line)) != []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("store.writer", "from jaxckpt_train.store.boxes import Box"),
        ("store.writer", "from .boxes import Box"),
        ("store.writer", "from ..errors import StorageError"),
        ("callback", "from jaxckpt_train.manager import StepManager"),
        ("__init__", "from jaxckpt_train import callback"),
    ],
)
def test_an_arrow_that_points_down_is_fine(name: str, line: str) -> None:
    assert upward_imports(Module(name, line)) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("store.writer", "import jax.numpy as jnp"),
        ("store.writer", "from flax import nnx"),
        ("checkpoint", "def lazy():\n    import flax.nnx"),
        ("callback", "if TYPE_CHECKING:\n    from omegaconf import DictConfig"),
        ("callback", "import hydra"),
        ("manager", "import orbax.checkpoint"),
        ("pytree.flatten", "import pickle"),
        ("pytree.flatten", "importlib.import_module('tensorstore')"),
        ("pytree.flatten", "import shutil"),
    ],
)
def test_a_foreign_import_is_found(name: str, line: str) -> None:
    assert foreign_imports(Module(name, line)) != []


@pytest.mark.parametrize(
    "line",
    [
        "open('a')",
        "os.unlink(path)",
        "os.path.exists(path)",
        "os.environ['A']",
        "remove = os.remove",
        "from os import unlink",
        "directory.mkdir()",
        "Path(name).read_text()",
        "Path(name).open()",
        "np.save(file, array)",
        "array.tofile(file)",
    ],
)
def test_a_touch_of_the_disk_is_found(line: str) -> None:
    assert disk_calls(Module("run.history", line)) != []
    assert disk_calls(Module("store.backends.local", line)) == []


def test_what_only_looks_like_the_disk_is_fine() -> None:
    source = (
        "os.getpid(); os.path.join(a, b); backend.open(a, b); text.replace(a, b); dataclasses.replace(a); self.open(1)"
    )
    assert disk_calls(Module("run.history", source)) == []


def test_long_function_is_found_without_its_docstring() -> None:
    lines = "\n".join(f"    x{number} = {number}" for number in range(MOST_LINES_OF_A_FUNCTION))
    docstring = textwrap.indent('"""' + "\nword" * 50 + '\n"""', "    ")
    assert long_functions(Module("pytree.flatten", f"def fine():\n{docstring}\n{lines}\n")) == []
    assert long_functions(Module("pytree.flatten", f"def long():\n{lines}\n    return 1\n")) != []


def test_an_import_cycle_is_found() -> None:
    one = Module("pytree.one", "from jaxckpt_train.pytree.two import x")
    two = Module("pytree.two", "import jaxckpt_train.pytree.one")
    assert set(import_cycle({"pytree.one": one, "pytree.two": two})) == {"pytree.one", "pytree.two"}
    lazy = Module("pytree.two", "def f():\n    import jaxckpt_train.pytree.one")
    assert import_cycle({"pytree.one": one, "pytree.two": lazy}) == []
