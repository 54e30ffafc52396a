"""``megabuf``: the commands, in one place."""

from __future__ import annotations

import typer

from megabuf_fx.cli.command import add_command
from megabuf_fx.cli.dumps import add_dump_commands
from megabuf_fx.cli.ledger_command import LedgerOptions, show_ledger
from megabuf_fx.cli.plan import PlanOptions, show_plan

# Plain help: pages are read in logs and pipes too, and look the same everywhere. Tracebacks are Python's own.
app = typer.Typer(name="megabuf", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _about() -> None:
    """Contiguous parameter and gradient buffers: what they look like and cost before anything runs, and what has
    run."""


add_command(app, "plan", PlanOptions, show_plan)
add_command(app, "ledger", LedgerOptions, show_ledger)
add_dump_commands(app)


def main() -> None:
    """Entry point of the script ``megabuf``."""
    app()
