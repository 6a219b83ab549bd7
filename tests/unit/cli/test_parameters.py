"""Arguments that are parsed without typer's converters have the values that typer would give them."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from jaxckpt_train.cli.main import PlainCommand

WHOLE = [
    "0", "7", "-7", "12345678901234567", "+7", "007", "-0", " 7 ", "7.0", "7.5", "1_000", "0x7", "1e3", "", "seven",
    "\u0667", "9999999999999999999999", "-1", "1", "10", "11", "nan", "true",
]  # fmt: skip


def outcome(cls: Any, arguments: list[str]) -> Any:
    """Return what a command is called with, or how the call is refused."""
    given: list[Any] = []
    app = typer.Typer(add_completion=False)

    @app.command(cls=cls)
    def command(
        plain: int = 3,
        ranged: Annotated[int, typer.Option(min=0, max=10)] = 4,
        several: Annotated[list[int] | None, typer.Option()] = None,
        least: Annotated[int | None, typer.Option(min=1)] = None,
        clamped: Annotated[int, typer.Option(min=0, max=10, clamp=True)] = 5,
        rate: float = 1.0,
        words: Annotated[list[str] | None, typer.Argument()] = None,
    ) -> None:
        given.extend((plain, ranged, several, least, clamped, rate, words))

    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output, repr(given)


@pytest.mark.parametrize("option", ["plain", "ranged", "several", "least", "clamped", "rate"])
@pytest.mark.parametrize("text", WHOLE)
def test_numbers_are_taken_and_refused_as_typer_does(option: str, text: str) -> None:
    arguments = [f"--{option}={text}"]
    assert outcome(PlainCommand, arguments) == outcome(None, arguments)


@pytest.mark.parametrize("arguments", [[], ["a", "1"], ["--several=1", "--several", "2", "x"], ["--ranged"], ["--no"]])
def test_other_arguments_are_parsed_as_typer_does(arguments: list[str]) -> None:
    assert outcome(PlainCommand, arguments) == outcome(None, arguments)
