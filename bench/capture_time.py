"""What capture() costs over the forward passes that it cannot do without.

The baseline is the decoder alone over the very same padded batches: they are recorded from a capture, then
run again without hooks, tokenisation or sums.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from common import Setup
from prism_delta import capture, find_sites
from prism_delta.pairs import shipped_pairs
from report import COMPARISON_COLUMNS, Report, Table, comparison_rows, say
from timing import compare, stopwatch

FORWARDS = "bare forwards"
QUICK_LINES = 6

Recorded = list[dict[str, torch.Tensor]]


def run(setup: Setup) -> Report:
    lines = shipped_pairs()[: setup.args.pair_lines or (QUICK_LINES if setup.quick else None)]
    model, tokenizer = setup.loaded
    decoder = find_sites(model).decoder
    batches = record(model, tokenizer, lines, decoder)
    rounds = setup.rounds(5)
    say(f"capture_time: {len(lines)} pairs, {len(batches)} batches, {rounds} rounds")
    samplers = {
        FORWARDS: stopwatch(lambda: forwards(decoder, batches)),
        "capture()": stopwatch(lambda: capture(model, tokenizer, lines)),
    }
    found = compare(samplers, baseline=FORWARDS, rounds=rounds, seed=setup.seed)
    size = {
        "pairs": len(lines),
        "batches": len(batches),
        "prompts": sum(len(batch["input_ids"]) for batch in batches),
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "padded_tokens": sum(batch["input_ids"].numel() for batch in batches),
    }
    title = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in size.items())
    columns = [name.replace("plain", FORWARDS) for name in COMPARISON_COLUMNS]
    return Report(
        "capture_time", [Table(title, columns, comparison_rows(found))], {**size, "comparison": asdict(found)}
    )


def record(model: nn.Module, tokenizer: Any, lines: list[dict[str, Any]], decoder: nn.Module) -> Recorded:
    """The inputs of every decoder pass of a capture."""
    batches: Recorded = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batches.append({name: kwargs[name].clone() for name in ("input_ids", "attention_mask")})

    handle = decoder.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        capture(model, tokenizer, lines)
    finally:
        handle.remove()
    return batches


def forwards(decoder: nn.Module, batches: Recorded) -> None:
    with torch.no_grad():
        for batch in batches:
            decoder(**batch, use_cache=False)
