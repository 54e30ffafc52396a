"""Commands whose options are a dataclass: written once, typed, and shared by several commands."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from megabuf_fx.cli.errors import CliError

Options = TypeVar("Options")


def add_command(app: typer.Typer, name: str, options: type[Options], run: Callable[[Options], None]) -> None:
    """Add the command ``name``, which calls ``run(options(...))``.

    Each field of the dataclass ``options`` is an ``Annotated`` option or argument of typer; the docstring of ``run``
    is the help text. A ``CliError`` ends in one line on stderr and exit code 2; anything else is a defect of ours and
    keeps its traceback.
    """

    def command(**values: Any) -> None:
        try:
            run(options(**values))
        except CliError as error:
            typer.echo(f"megabuf {name}: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None

    # Typer reads the signature of the function it calls; that of the dataclass has what it wants, once resolved.
    hints = typing.get_type_hints(options, include_extras=True)
    signature = inspect.signature(options)
    parameters = [parameter.replace(annotation=hints[key]) for key, parameter in signature.parameters.items()]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    command.__annotations__ = {}
    app.command(name)(command)
