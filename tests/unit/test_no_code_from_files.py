"""Nothing in a checkpoint's files can become code: the source neither evaluates text nor imports by a name."""

from __future__ import annotations

import ast

import pytest

from tests.support.layers import MAY_READ_A_PICKLE
from tests.unit.test_layering import FORBIDDEN_STDLIB, MODULES, Module, foreign_imports, imports_of

EVALUATE = {"__import__", "compile", "eval", "exec"}
# What runs or finds code by its name, or makes objects of whatever type a file names.
MORE_FORBIDDEN_STDLIB = {"builtins", "code", "codeop", "copyreg", "imp", "pickletools", "pkgutil", "pydoc", "runpy"}
BY_NAME = {"import_module", "find_spec", "locate", "resolve_name", "instantiate", "get_class", "get_object"}
MAY_IMPORT_BY_NAME = {
    ("__init__", "importlib.import_module(f'{__name__}.{_HOME_OF[name]}')"): "its own modules, from its own table",
    ("__init__", "importlib.import_module(f'{__name__}.{name}')"): "its own modules, from its own table",
    ("cli.main", "importlib.import_module(f'jaxckpt_train.cli.{module}')"): "its own modules, from its own table",
    ("testing.processes", "import runpy"): "a proof runs the script that the user's own test names",
    ("testing.processes", "importlib.import_module(name)"): "the module of the function that the test gives",
    ("testing.processes", "importlib.util.find_spec"): "the script that the user's own test names as a module",
    ("config", "importlib.import_module(__package__)"): "this package",
    ("config", "hydra.utils.instantiate"): "`_target_` of the user's configuration, not of a checkpoint",
}

UNPICKLER = {"pickle._Unpickler", "pickle._Unpickler.dispatch"}


def code_from_text(module: Module) -> list[str]:
    """Return where text may become code, or a name may become a module."""
    problems, nodes = [], list(ast.walk(module.tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        match node:
            case ast.Name(id=name) if name in EVALUATE or name == "__builtins__":
                wrong = True
            case ast.Attribute(attr=name) if name in EVALUATE - {"compile"}:
                wrong = True
            case ast.Attribute(value=ast.Name(id=owner), attr="compile"):
                wrong = owner != "re"
            case ast.ImportFrom(names=aliases):
                wrong = any(alias.name in BY_NAME | EVALUATE for alias in aliases)
            case ast.Call(func=ast.Attribute(attr="import_module")):
                wrong = not _is_fixed(node)
            case ast.Name(id=name) if name in BY_NAME:
                wrong = True
            case ast.Attribute(attr=name) if name in BY_NAME:
                wrong = name != "import_module" or id(node) not in called
            case ast.keyword(arg="allow_pickle", value=value):
                wrong = not (isinstance(value, ast.Constant) and value.value is False)
            case ast.Import(names=aliases):
                wrong = any(alias.name.partition(".")[0] in MORE_FORBIDDEN_STDLIB for alias in aliases)
            case _:
                wrong = False
        if wrong and (module.name, ast.unparse(node)) not in MAY_IMPORT_BY_NAME:
            problems.append(f"{module.name}:{node.lineno} may run what a file says: {ast.unparse(node)}")
    return problems


def unpickling(module: Module) -> list[str]:
    """Return where the one file that may import `pickle` uses more of it than an unpickler that it restricts."""
    problems = []
    for node in ast.walk(module.tree):
        match node:
            case ast.ImportFrom(module="pickle"):
                problems.append(f"{module.name}:{node.lineno} imports from pickle, expected its names behind a dot")
            case ast.Attribute(value=ast.Name(id="pickle"), attr=name) if not name.isupper():
                if ast.unparse(node) not in UNPICKLER:
                    problems.append(f"{module.name}:{node.lineno} uses {ast.unparse(node)}")
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name) if name not in (
                "__init__",
                "__new__",
            ):
                problems.append(f"{module.name}:{node.lineno} leaves to pickle what it should refuse: super().{name}")
    return problems


def _is_fixed(call: ast.Call) -> bool:
    first = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return isinstance(first, ast.Constant) and isinstance(first.value, str)


@pytest.mark.parametrize("name", list(MODULES))
def test_no_text_becomes_code(name: str) -> None:
    assert code_from_text(MODULES[name]) == []


@pytest.mark.parametrize(("name", "source"), MAY_IMPORT_BY_NAME)
def test_each_exception_is_needed(name: str, source: str) -> None:
    assert source in [ast.unparse(node) for node in ast.walk(MODULES[name].tree)]
    assert code_from_text(Module("store.manifest", source)) != []


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "compile(text, 'a', 'eval')",
        "__import__(name)",
        "run = eval",
        "map(eval, texts)",
        "builtins.eval(text)",
        "__builtins__['eval'](text)",
        "import builtins",
        "from builtins import eval as run",
        "codeop.compile(text)",
        "importlib.import_module(name)",
        "importlib.import_module('jaxckpt_train.' + name)",
        "importlib.import_module(f'jaxckpt_train.{name}')",
        "importlib.import_module(name=name)",
        "importlib.import_module('.x', package)",
        "importlib.import_module(b'x')",
        "from importlib import import_module",
        "from importlib import import_module as load",
        "load = importlib.import_module",
        "import_module(name)",
        "importlib.util.find_spec(name)",
        "pydoc.locate(name)",
        "import runpy",
        "import pkgutil",
        "from hydra.utils import instantiate",
        "hydra.utils.get_class(name)",
        "np.frombuffer(data, allow_pickle=True)",
        "read(data, allow_pickle=is_trusted)",
        "def lazy():\n    return eval(text)",
    ],
)
def test_text_that_may_become_code_is_found(line: str) -> None:
    assert code_from_text(Module("store.manifest", line)) != []


@pytest.mark.parametrize(
    "line",
    [
        "re.compile('a')",
        "importlib.import_module('blake3')",
        "jax.eval_shape(f)",
        "read(data, allow_pickle=False)",
        "self.compiled(text)",
        "import importlib",
    ],
)
def test_what_only_looks_like_code_is_fine(line: str) -> None:
    assert code_from_text(Module("store.manifest", line)) == []


@pytest.mark.parametrize("name", sorted(FORBIDDEN_STDLIB))
def test_no_form_of_pickle_is_imported(name: str) -> None:
    for line in (f"import {name}", f"from {name} import loads", f"importlib.import_module({name!r})"):
        assert foreign_imports(Module("store.manifest", line)) != []


def test_one_file_reads_pickles_and_restricts_them() -> None:
    assert {name for name in MODULES for found in imports_of(MODULES[name]) if found.name == "pickle"} == {
        *MAY_READ_A_PICKLE
    }
    for name in MAY_READ_A_PICKLE:
        assert unpickling(MODULES[name]) == []
        assert foreign_imports(Module(name, "import marshal")) != []


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(data)",
        "pickle.load(file)",
        "pickle.Unpickler(file)",
        "from pickle import loads",
        "super().find_class(module, name)",
        "super().load_reduce()",
    ],
)
def test_unrestricted_unpickling_is_found(line: str) -> None:
    assert unpickling(Module("formats.torch_pickle", line)) != []
