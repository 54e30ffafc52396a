"""What a user did wrong, in one line."""

from __future__ import annotations


class CliError(ValueError):
    """Bad input: the message goes to stderr in one line and the exit code is 2."""
