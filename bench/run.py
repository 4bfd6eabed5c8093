"""Run the benchmarks: writes JSON and prints Markdown tables. See README.md here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import capture_time
import counterfact
import highlight_share
import memory
import overhead
from common import Setup
from prism_delta.errors import PrismError
from prism_delta.models import DEFAULT_MODEL
from report import RESULTS, BenchError, MissingDataError, Report, environment, say, write_json

BENCHMARKS: dict[str, Callable[[Setup], Report]] = {
    "overhead": overhead.run,
    "highlight_share": highlight_share.run,
    "capture_time": capture_time.run,
    "memory": memory.run,
    "counterfact": counterfact.run,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that everything works, measures nothing"
    )
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="this benchmark alone; may be repeated")
    parser.add_argument("--repeats", type=int, help="rounds of every comparison (default: each benchmark's own)")
    parser.add_argument("--out", type=Path, help="one JSON file for everything (default: bench/results/NAME.json)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="alias, folder or Hub id (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of token ids, order and bootstrap (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    parser.add_argument(
        "--budget", type=float, default=300, help="seconds a case of overhead may take, 0 for any (default: 300)"
    )
    parser.add_argument("--pair-lines", type=int, help="capture_time: only so many of the shipped pairs")
    counterfact.add_arguments(parser)
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.repeats is not None and args.repeats < 1:
        parser.error("--repeats must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    setup = Setup(args)
    collected: dict[str, Any] = {}
    texts: list[str] = []
    failed = False
    for name in args.only or BENCHMARKS:
        load = environment(args.model)
        try:
            report = BENCHMARKS[name](setup)
        except (BenchError, PrismError) as error:
            say(f"{name}: {error}")
            failed |= bool(args.only) or not isinstance(error, MissingDataError)
            continue
        print(report.markdown() + "\n", flush=True)
        content = {"environment": load, "quick": args.quick, "left_out": report.left_out, **report.data}
        collected[name] = content
        folder = RESULTS / "quick" if args.quick else RESULTS
        if args.out:
            write_json(args.out, collected)
            texts.append(report.markdown())
            args.out.with_suffix(".md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
            continue
        stem = name if args.model == DEFAULT_MODEL else f"{name}-{args.model.rsplit('/', 1)[-1]}"
        write_json(folder / f"{stem}.json", {"benchmark": name, **content})
        (folder / f"{stem}.md").write_text(report.markdown() + "\n", encoding="utf-8")  # docs/generate.py shows it
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
