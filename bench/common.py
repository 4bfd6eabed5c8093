"""What the benchmarks share: the model and its plans, random batches, and the ways to run them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from prism_delta import Batch, Moments, Plan, get_method, load_model, steer
from prism_delta.presets import recommended
from prism_delta.store import cached_moments
from report import say

PLAIN = "plain"


class Setup:
    """The options of a run and, loaded when first asked for, the model with its moments and plans."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.quick: bool = args.quick
        self.seed: int = args.seed

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        say(f"loading {self.args.model}")
        return load_model(self.args.model)

    @property
    def model(self) -> Any:
        return self.loaded[0]

    @cached_property
    def moments(self) -> Moments:
        return cached_moments(*self.loaded, progress=True)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The recommended setting and the worst case (every head), for keys alone and for keys and values."""
        best = recommended(str(self.moments.header["model"]["name"]), "prism")
        every = {**best, "layers": "all", "keep": 1.0}
        settings = {
            "K": best,
            "K+V": {**best, "value_gain": 0.1},
            "K, every head": every,
            "K+V, every head": {**every, "value_gain": 0.1},
        }
        return {name: get_method("prism").plan(self.moments, **params) for name, params in settings.items()}

    def rounds(self, full: int) -> int:
        """How often to repeat: what was asked for, or 2 in a quick run, or the benchmark's own number."""
        return int(self.args.repeats or (2 if self.quick else full))

    def batch(self, size: int, length: int, highlighted: int) -> Batch:
        return random_batch(int(self.model.config.vocab_size), size, length, highlighted, self.seed)

    def describe_plans(self) -> dict[str, Any]:
        return {name: {"params": plan.header["params"], "bytes": plan.nbytes} for name, plan in self.plans.items()}


def random_batch(vocabulary: int, size: int, length: int, highlighted: int, seed: int) -> Batch:
    """Random ordinary token ids; `highlighted` tokens in the middle of every prompt have strength 1."""
    # The first ids are special tokens and bytes in the usual tokenizers.
    low = min(300, vocabulary // 2)
    ids = torch.randint(low, vocabulary, (size, length), generator=torch.Generator().manual_seed(seed))
    strengths = torch.zeros(size, length)
    first = (length - highlighted) // 2
    strengths[:, first : first + highlighted] = 1.0
    return Batch.from_ids(ids, strengths)


def steering(model: Any, plan: Plan | None, batch: Batch) -> AbstractContextManager[object]:
    """The steer block of a plan, or nothing for the plain model."""
    return nullcontext() if plan is None else steer(model, plan, batch)


def call_with(model: Any, plan: Plan | None, batch: Batch, run: Callable[[Any, Batch], object]) -> Callable[[], None]:
    """A call that enters the block, runs the model on the batch and leaves the block."""

    def call() -> None:
        with torch.no_grad(), steering(model, plan, batch):
            run(model, batch)

    return call


def prefill(model: Any, batch: Batch) -> Any:
    """The pass that generation begins with: fills a cache, makes the logits of the last token only."""
    return model(**batch.inputs, use_cache=True, logits_to_keep=1)


def generate(model: Any, batch: Batch, new_tokens: int) -> Any:
    """Greedy, exactly `new_tokens` long whatever the model says."""
    end = model.generation_config.eos_token_id
    pad = end[0] if isinstance(end, list) else end
    return model.generate(
        **batch.inputs, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=pad
    )
