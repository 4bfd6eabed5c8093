"""The `prism` command: parse, call, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys

from ..errors import PrismError
from .app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; the library's errors become one message and an exit code."""
    try:
        app()
    except PrismError as error:
        sys.stderr.write(f"prism: {error}\n")
        sys.exit(error.exit_code)
