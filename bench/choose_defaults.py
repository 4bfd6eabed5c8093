"""Choose default settings on CounterFact validation records (case_id 0 to 4999); the test records are not touched.

Every setting's score is appended to a file as soon as it is known, so that a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from counterfact import make_jobs, parse_setting, score
from counterfact_data import DATA, load_records
from prism_delta import Highlighter, load_model
from prism_delta.highlighter import make_plan
from prism_delta.models import DEFAULT_MODEL
from prism_delta.store import cached_moments
from report import RESULTS, environment, say

VALIDATION = 5000
KEEPS = (0.05, 0.1, 0.2, 0.33, 0.5, 0.66)
GAINS = (0.5, 1, 2, 4, 6, 8)


def grid() -> Iterator[str]:
    """Both ways to project, by share of heads and gain; the paper's and the reference's conventions by gain."""
    yield "method=none"
    for method in ("prism", "scale"):
        for keep in KEEPS:
            for gain in GAINS:
                yield f"method={method},keep={keep},key_gain={gain}"
    for convention in ("paper", "reference"):
        for gain in (1, 2, 4):
            yield f"method=prism,convention={convention},key_gain={gain}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--records", type=int, default=150, help="spread evenly over the validation split")
    parser.add_argument("--out", type=Path, help="default: bench/results/defaults-MODEL.jsonl")
    args = parser.parse_args()
    out: Path = args.out or RESULTS / f"defaults-{args.model}.jsonl"
    records = load_records(args.data, 0, VALIDATION - 1)
    records = records[:: max(1, len(records) // args.records)][: args.records]
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {item["setting"] for item in known if item["n"] == len(records)}
    model, tokenizer = load_model(args.model)
    moments = cached_moments(model, tokenizer, progress=True)
    jobs = make_jobs(records, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    for setting in grid():
        if setting in done:
            continue
        method, params = parse_setting(setting)
        highlighter = Highlighter(model, tokenizer, make_plan(moments, method, params))
        found = asdict(score(setting, highlighter, jobs, 16))
        found |= {"model": moments.header["model"], "pairs": moments.header["pairs"], "rows": moments.count}
        found |= {"first": records[0].case_id, "last": records[-1].case_id, "environment": environment(args.model)}
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        say(f"{setting}: efficacy {found['efficacy']:.3f}, p(new) {found['probability_new']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
