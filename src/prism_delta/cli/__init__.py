"""The `prism` command: parse, call, print. Heavy imports happen inside the commands."""

from __future__ import annotations

import os
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
    except KeyboardInterrupt:
        sys.stderr.write("prism: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
