"""Where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "PRISM_DELTA_CACHE"


def cache_dir() -> Path:
    """`~/.cache/prism-delta`, or what the environment variable PRISM_DELTA_CACHE says."""
    chosen = os.environ.get(ENVIRONMENT)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "prism-delta"
