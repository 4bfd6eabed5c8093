"""`python -m prism_delta` is the `prism` command."""

from .cli import main

main()
