"""What steering costs: whole generations, the prefill alone, and decode steps after a steered prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import DynamicCache

from common import PLAIN, Setup, call_with, generate, prefill, steering
from prism_delta import Batch, Plan
from report import COMPARISON_COLUMNS, Report, Table, available_memory, comparison_rows, say
from timing import Comparison, Sampler, compare, stopwatch

MIN_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """One comparison: what is run, on how many prompts of how many tokens."""

    kind: Literal["end to end", "prefill", "decode step"]
    prompt: int
    highlighted: int
    batch: int = 1
    new_tokens: int = 0
    rounds: int = 15

    @property
    def title(self) -> str:
        more = f", {self.new_tokens} new" if self.kind == "end to end" else ""
        return f"{self.kind}: {self.batch} x {self.prompt} tokens, {self.highlighted} highlighted{more}"

    @property
    def passes(self) -> int:
        """Tokens of the prompts and of the steps, as a rough measure of the work."""
        return self.batch * (self.prompt + 20 * self.new_tokens)


FULL = (
    Case("prefill", 512, 128),
    Case("decode step", 512, 128, new_tokens=64),
    Case("end to end", 512, 128, new_tokens=32),
    Case("prefill", 512, 128, batch=8),
    Case("prefill", 4096, 1024),
    Case("prefill", 4096, 1024, batch=8),
)
QUICK = (
    Case("prefill", 64, 16),
    Case("decode step", 64, 16, new_tokens=8),
    Case("end to end", 64, 16, new_tokens=4),
    Case("prefill", 64, 16, batch=4),
    Case("prefill", 256, 64),
)


def run(setup: Setup) -> Report:
    done: list[tuple[Case, Comparison]] = []
    left_out: list[str] = []
    for case in QUICK if setup.quick else FULL:
        rounds, reason = affordable(setup, case, done)
        if reason:
            left_out.append(f"{case.title}: {reason}")
            say(left_out[-1])
        if rounds:
            say(f"overhead: {case.title}, {rounds} rounds")
            done.append((case, measure(setup, case, rounds)))
    tables = [Table(case.title, COMPARISON_COLUMNS, comparison_rows(found)) for case, found in done]
    cases = [{"case": asdict(case), "comparison": asdict(found)} for case, found in done]
    return Report("overhead", tables, {"plans": setup.describe_plans(), "cases": cases}, left_out)


def affordable(setup: Setup, case: Case, done: list[tuple[Case, Comparison]]) -> tuple[int, str]:
    """Rounds that fit into the time and memory there is, and the reason where they are fewer than wanted."""
    rounds, budget = setup.rounds(case.rounds), float(setup.args.budget)
    needed, free = memory_needed(setup.model.config, case), available_memory()
    if free is not None and needed > 0.8 * free:
        return 0, f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    prefills = [item for item in done if item[0].kind == "prefill"]
    if not prefills or not budget:
        return rounds, ""
    # The latest is the largest and predicts best: attention makes long prompts dearer than their tokens.
    known, found = prefills[-1]
    variants = len(found.rows)
    a_round = sum(row.median for row in found.rows) * case.passes / known.passes
    fits = int(budget / a_round) - 1  # one round warms up
    if fits >= rounds:
        return rounds, ""
    expected = f"a round of {variants} variants takes about {a_round:.0f} s, the budget of a case is {budget:.0f} s"
    if fits >= MIN_ROUNDS:
        return fits, f"{fits} of {rounds} rounds only: {expected}"
    return 0, f"{expected}, too little for {MIN_ROUNDS} rounds"


def memory_needed(config: Any, case: Case) -> int:
    """Bytes of the KV cache and of the widest moment of a layer, in float32: an upper guess."""
    heads = config.num_key_value_heads * (config.head_dim or config.hidden_size // config.num_attention_heads)
    a_token = 2 * config.num_hidden_layers * heads + 6 * (config.intermediate_size + config.hidden_size)
    return int(4 * a_token * case.batch * (case.prompt + case.new_tokens))


def measure(setup: Setup, case: Case, rounds: int) -> Comparison:
    batch = setup.batch(case.batch, case.prompt, case.highlighted)
    variants: Mapping[str, Plan | None] = {PLAIN: None, **setup.plans}
    samplers = {name: sampler(setup.model, plan, batch, case) for name, plan in variants.items()}
    return compare(samplers, baseline=PLAIN, rounds=rounds, seed=setup.seed)


def sampler(model: Any, plan: Plan | None, batch: Batch, case: Case) -> Sampler:
    """One measurement of a variant; entering and leaving the steer block is part of it, except for a decode step."""
    if case.kind == "decode step":
        return partial(decode_step, model, plan, batch, case.new_tokens)
    run_model = prefill if case.kind == "prefill" else partial(generate, new_tokens=case.new_tokens)
    return stopwatch(call_with(model, plan, batch, run_model))


def decode_step(model: Any, plan: Plan | None, batch: Batch, steps: int) -> float:
    """Median seconds of one-token passes inside the block, after the (untimed) prompt."""
    token = batch.input_ids[:, -1:]
    times = []
    with torch.no_grad(), steering(model, plan, batch):
        cache = DynamicCache(config=model.config)  # given from the start, as generate() does
        model(**batch.inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(steps):
            begin = time.perf_counter()
            model(input_ids=token, past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
