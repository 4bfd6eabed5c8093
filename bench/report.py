"""What a benchmark hands back: tables for people, JSON for programs, and the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from timing import Comparison, Interval

RESULTS = Path(__file__).parent / "results"


class BenchError(Exception):
    """A benchmark cannot run here; the message says why and what to do."""


class MissingDataError(BenchError):
    """Data that nobody asked for by name is not there: the benchmark is left out, which is no failure."""


@dataclass(frozen=True)
class Table:
    """A Markdown table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"### {self.title}\n\n" + "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


@dataclass(frozen=True)
class Report:
    """The outcome of one benchmark: tables for people, data for programs, and what was left out with the reason."""

    name: str
    tables: Sequence[Table]
    data: dict[str, Any]
    left_out: Sequence[str] = ()

    def markdown(self) -> str:
        notes = [f"Note: {reason}" for reason in self.left_out]
        return "\n\n".join([f"## {self.name}", *(table.markdown() for table in self.tables), *notes])


def comparison_rows(comparison: Comparison, *lead: object) -> list[list[object]]:
    return [
        [*lead, row.name, seconds_text(row.median), interval_text(row.ratio), comparison.n] for row in comparison.rows
    ]


COMPARISON_COLUMNS = ("variant", "median", "ratio to plain [95 %]", "rounds")


def interval_text(interval: Interval) -> str:
    return f"{interval.median:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def bytes_text(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if abs(count) >= 2**20 else f"{count / 2**10:.1f} KiB"


def environment(model: str) -> dict[str, Any]:
    """Where numbers come from: versions and the machine, no names and no paths."""
    packages = ("prism-delta", "torch", "transformers", "numpy")
    return {
        "model": os.path.basename(model.rstrip("/")) if os.path.isdir(model) else model,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """Progress, apart from the results on stdout."""
    print(text, file=sys.stderr, flush=True)
