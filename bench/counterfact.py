"""Efficacy on CounterFact: is the first token of the highlighted new object more likely than that of the old one?"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Setup
from counterfact_data import DATA, Record, default_data_text, load_records, missing_text
from prism_delta import CaptureOptions, Highlighter, Prompt
from prism_delta.highlighter import make_plan
from prism_delta.methods.base import parse_settings
from prism_delta.store import cached_moments
from report import MissingDataError, Report, Table, say

NO_EDIT = "method=none"
DEFAULT_SETTINGS = ("method=prism", "method=scale")
QUICK_RECORDS = 24


@dataclass(frozen=True)
class Score:
    """One setting over all records. `ties` are records whose objects begin with the same token; they count as lost."""

    setting: str
    method: str
    params: dict[str, Any]
    n: int
    efficacy: float
    low: float
    high: float
    probability_new: float
    probability_old: float
    ties: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("counterfact")
    group.add_argument("--data", type=Path, help=f"records, .jsonl or .jsonl.gz (default: {default_data_text()})")
    group.add_argument("--first", type=int, default=5000, help="first case_id (default: %(default)s)")
    group.add_argument("--last", type=int, default=5199, help="last case_id, included (default: %(default)s)")
    group.add_argument(
        "--setting",
        action="append",
        metavar="KEY=VALUE,...",
        help="method and parameters, e.g. method=prism,key_gain=4; may be repeated; without parameters those "
        f"recommended for the model (default: {' and '.join(DEFAULT_SETTINGS)}); plain is always included",
    )
    group.add_argument("--pairs", type=Path, help="contrastive pairs to capture (default: the shipped ones)")
    group.add_argument("--capture-convention", choices=("paper", "reference"), default="paper")
    group.add_argument("--batch-size", type=int, default=16, help="prompts a forward pass (default: %(default)s)")


def run(setup: Setup) -> Report:
    args = setup.args
    path = args.data or DATA
    if not args.data and not path.is_file():
        raise MissingDataError(missing_text(path))
    records = load_records(path, args.first, args.last)[: QUICK_RECORDS if setup.quick else None]
    settings = [NO_EDIT, *(args.setting or DEFAULT_SETTINGS)]
    model, tokenizer = setup.loaded
    options = CaptureOptions(convention=args.capture_convention)
    moments = cached_moments(model, tokenizer, args.pairs, options=options, progress=True)
    plans = {text: make_plan(moments, *parse_setting(text)) for text in settings}
    jobs = make_jobs(records, tokenizer)
    scores = []
    for text, plan in plans.items():
        say(f"counterfact: {text}, {len(records)} records")
        scores.append(score(text, Highlighter(model, tokenizer, plan), jobs, args.batch_size))
    data = {
        "data": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "first": records[0].case_id,
        "last": records[-1].case_id,
        "n": len(records),
        "pairs": {"file": args.pairs.name if args.pairs else "shipped", "hash": moments.header["pairs"]},
        "moments": {"rows": moments.count, **{key: moments.header[key] for key in ("model", "options", "triplets")}},
        "batch_size": args.batch_size,
        "scores": [asdict(item) for item in scores],
    }
    return Report("counterfact", [table(scores, records, setup.args.model)], data)


def table(scores: Sequence[Score], records: Sequence[Record], model: str) -> Table:
    columns = ("setting", "n", "efficacy [95 %]", "p(new)", "p(old)")
    rows = [
        [
            "plain" if item.setting == NO_EDIT else f"`{item.setting}`",
            item.n,
            f"{item.efficacy:.3f} [{item.low:.3f}, {item.high:.3f}]",
            f"{item.probability_new:.3f}",
            f"{item.probability_old:.3f}",
        ]
        for item in scores
    ]
    return Table(f"{model}, CounterFact records {records[0].case_id} to {records[-1].case_id}", columns, rows)


def parse_setting(text: str) -> tuple[str, Mapping[str, str]]:
    """Method and parameters of `method=prism,layers=3,5,key_gain=4`; values may hold commas."""
    found = dict(parse_settings(re.split(r",(?=[^,=]+=)", text)))
    return found.pop("method", "prism"), found


@dataclass(frozen=True)
class Job:
    """A record ready to score: its prompt, how long that is, and the first tokens of both objects."""

    prompt: Prompt
    length: int
    new: int
    old: int


def make_jobs(records: Sequence[Record], tokenizer: Any) -> list[Job]:
    """Sorted by length, so that batches hold little padding."""
    jobs = []
    for record in records:
        prompt = record.highlighted()
        new, old = (
            tokenizer(f" {text}", add_special_tokens=False)["input_ids"][0] for text in (record.new, record.old)
        )
        jobs.append(Job(prompt, len(tokenizer(prompt.text)["input_ids"]), new, old))
    return sorted(jobs, key=lambda job: job.length)


def score(setting: str, highlighter: Highlighter, jobs: Sequence[Job], batch_size: int) -> Score:
    """Run every job under one setting."""
    pairs = list(probabilities(highlighter, jobs, batch_size))
    header = highlighter.plan.header
    n = len(pairs)
    wins = sum(new > old for new, old in pairs)
    mean_new, mean_old = (sum(values) / n for values in zip(*pairs, strict=True))
    ties = sum(job.new == job.old for job in jobs)
    found = (n, wins / n, *wilson(wins, n), mean_new, mean_old, ties)
    return Score(setting, header["method"], dict(header["params"]), *found)


def probabilities(highlighter: Highlighter, jobs: Sequence[Job], batch_size: int) -> Iterator[tuple[float, float]]:
    """Probabilities of the new and the old object's first token; one batch of logits at a time."""
    for begin in range(0, len(jobs), batch_size):
        batch = jobs[begin : begin + batch_size]
        found = highlighter.next_token_logits([job.prompt for job in batch]).softmax(-1)
        for row, job in zip(found, batch, strict=True):
            yield float(row[job.new]), float(row[job.old])


def wilson(wins: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, square = wins / n, z * z / n
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / n + square / (4 * n))
    return middle - half, middle + half
