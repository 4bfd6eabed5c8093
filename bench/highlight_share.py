"""How the cost of a steered prefill grows with the share of highlighted tokens."""

from __future__ import annotations

from dataclasses import asdict

from common import PLAIN, Setup, call_with, prefill
from report import COMPARISON_COLUMNS, Report, Table, comparison_rows, say
from timing import compare, stopwatch

SHARES = (0.01, 0.10, 0.25, 0.50, 1.00)
PLANS = ("K", "K+V, every head")  # the recommended edit and the largest one


def run(setup: Setup) -> Report:
    length = 64 if setup.quick else 512
    rounds = setup.rounds(15)
    samplers = {PLAIN: stopwatch(call_with(setup.model, None, setup.batch(1, length, 0), prefill))}
    for name in PLANS:
        for share in SHARES:
            batch = setup.batch(1, length, max(1, round(share * length)))
            call = call_with(setup.model, setup.plans[name], batch, prefill)
            samplers[f"{name}: {share:.0%}"] = stopwatch(call)
    say(f"highlight_share: {len(samplers) + 1} variants, {rounds} rounds")
    found = compare(samplers, baseline=PLAIN, rounds=rounds, seed=setup.seed)
    table = Table(f"prefill of {length} tokens by share highlighted", COMPARISON_COLUMNS, comparison_rows(found))
    data = {"prompt": length, "shares": SHARES, "plans": setup.describe_plans(), "comparison": asdict(found)}
    return Report("highlight_share", [table], data)
