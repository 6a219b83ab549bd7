"""Operations on trees as commands take them: one by one, or a file of them; and what they would change."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from jaxckpt_train.cli.arguments import BACKEND, absolute
from jaxckpt_train.cli.output import print_columns, print_text
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.opened import Opened
from jaxckpt_train.store.plain_files import read_whole
from jaxckpt_train.surgery.operate import Operated, operate
from jaxckpt_train.surgery.operation import Operation
from jaxckpt_train.surgery.parsing import operations_of, parse_operation

MOST_BYTES = 16 << 20
MOST_SHOWN = 40
Operations = Annotated[
    list[str] | None,
    typer.Option(
        "--op",
        "-o",
        help="A change of the tree, such as 'rename model/** params/**', 'drop head/**', 'cast ** bfloat16', "
        "'stack layers/{}/** layers/**', 'transpose */kernel 1,0'; several are applied in their order.",
        show_default=False,
    ),
]
OperationsFile = Annotated[
    str | None,
    typer.Option(
        "--surgery",
        help="A file of such changes, JSON or YAML.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Print what would be changed and written; write nothing.")
]


def chosen_operations(file: str | None, texts: list[str] | None) -> tuple[Operation, ...]:
    """The operations of a file, and then those of the command line.

    Raises:
        SettingsError: one is none, or the file holds no list of them.
        StorageError: the file cannot be read.
    """
    found, texts = tuple[Operation, ...](), texts or []
    if file is not None:
        path = absolute(file)
        folder, _, name = path.rpartition("/")
        data = bytes(memoryview(read_whole(BACKEND, folder or "/", name, MOST_BYTES)))
        given = _decoded(path, data)
        found = operations_of(path, given, len(given) + len(texts) if isinstance(given, list) else None)
    first, in_all = len(found) + 1, len(found) + len(texts)
    return (*found, *(parse_operation(text, number, in_all) for number, text in enumerate(texts, first)))


def _decoded(path: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        not_json = error
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError(f"{path}: not JSON: {not_json}; YAML is read where PyYAML is installed") from not_json
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: neither JSON nor YAML: {' '.join(str(error).split())}") from error


def changed(opened: Opened, part: str, operations: tuple[Operation, ...]) -> Operated:
    """The opened checkpoint with operations applied to one of its trees; nothing is read yet."""
    return operate(opened.files, opened.committed, part, operations, opened.settings)


def plan_json(operated: Operated) -> list[dict[str, Any]]:
    """The plan as JSON has it."""
    return [
        {"op": name, "changes": [{"from": old, "to": new} for old, new in changes]} for name, changes in operated.plan
    ]


def print_plan(operated: Operated) -> None:
    """The plan for people; of very many changes of one operation the first ones."""
    for number, (name, changes) in enumerate(operated.plan, 1):
        print_text(f"{number}. {name}: {len(changes)} {'change' if len(changes) == 1 else 'changes'}")
        rows = [["  " + old, "->", new] for old, new in changes[:MOST_SHOWN]]
        if rows:
            print_columns(rows[0], rows[1:], [False, False, False])
        if len(changes) > MOST_SHOWN:
            print(f"  ... and {len(changes) - MOST_SHOWN} more")
