"""Paired, interleaved measurement: every round runs every variant once, in a new random order.

What disturbs a machine lasts longer than one call, so it falls on all variants of a round alike and leaves
their ratio alone. The baseline runs twice under two names: its A/A ratio is the noise floor of the rest.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Sampler: TypeAlias = Callable[[], float]
"""Measures its variant once and returns the number: seconds, or bytes."""

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A median over rounds and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One variant: its median, and the median of its per-round ratios to the baseline."""

    name: str
    median: float
    ratio: Interval


@dataclass(frozen=True)
class Comparison:
    """All variants of one comparison; `samples` holds every round, in the order of rounds."""

    baseline: str
    control: str
    n: int
    warmup: int
    order_seed: int
    bootstrap_seed: int
    resamples: int
    rows: list[Row]
    samples: dict[str, list[float]]


def stopwatch(call: Callable[[], object]) -> Sampler:
    """A sampler of the seconds that a call takes."""

    def sample() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return sample


def compare(
    samplers: Mapping[str, Sampler],
    *,
    baseline: str,
    rounds: int,
    seed: int = 0,
    warmup: int = 1,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Measure all variants and the A/A control; ratios are to `baseline`, round by round."""
    control = f"{baseline} (A/A)"
    everyone = {baseline: samplers[baseline], control: samplers[baseline], **samplers}
    samples = interleave(everyone, rounds=rounds, seed=seed, warmup=warmup)
    rows = [
        Row(name, statistics.median(values), bootstrap_median(ratios(values, samples[baseline]), seed, resamples))
        for name, values in samples.items()
    ]
    return Comparison(baseline, control, rounds, warmup, seed, seed, resamples, rows, samples)


def interleave(
    samplers: Mapping[str, Sampler], *, rounds: int, seed: int = 0, warmup: int = 0
) -> dict[str, list[float]]:
    """Samples by variant, a round after the other; warm-up rounds are run and not kept."""
    order = list(samplers)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(warmup + rounds):
        shuffle(order)
        for name in order:
            with collector_off():
                value = samplers[name]()
            if number >= warmup:
                samples[name].append(value)
    return samples


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect garbage now and not again before the end of the block."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Round by round, value / baseline."""
    return [value / base for value, base in zip(values, baseline, strict=True)]


def differences(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Round by round, value - baseline."""
    return [value - base for value, base in zip(values, baseline, strict=True)]


def bootstrap_median(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The median and the percentile interval of the medians of resampled rounds."""
    data = np.asarray(values, dtype=np.float64)
    picked = np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))
    low, high = np.percentile(np.median(data[picked], axis=1), [2.5, 97.5])
    return Interval(float(np.median(data)), float(low), float(high))
