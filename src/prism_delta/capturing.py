"""Pairs x model -> Moments, in one batched pass over the decoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import CaptureError, ParameterError
from .examples import CaptureOptions, Example, make_examples
from .fingerprint import model_identity, tokenizer_hash
from .moments import HeadMoments, Moments
from .pairs import Pairs, load_triplets, triplets_hash
from .sites import Channel, Site, Sites, find_sites

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CAPTURE_VERSION = 1  # raised when the same inputs would give other moments; part of the cache's key
_WINDOW = 64  # triplets whose rows wait for each other; memory grows with this, not with the data


def capture(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Pairs = None,
    *,
    options: CaptureOptions | None = None,
    batch_tokens: int = 4096,
    progress: bool = False,
    **named: Any,
) -> Moments:
    """Run contrastive triplets through the model once and accumulate their moments.

    pairs: a JSONL path, an iterable of lines or Triplets, or None for the shipped ones.
    options, or its fields by name: `capture(model, tokenizer, convention="reference")`.
    batch_tokens: padded tokens per forward pass.
    """
    options = _options(options, named)
    if batch_tokens < 1:
        raise ParameterError(f"batch_tokens must be at least 1, found {batch_tokens}")
    triplets = load_triplets(pairs)
    config = getattr(model, "config", None)
    text_config = config.get_text_config(decoder=True) if config is not None else None
    limit = getattr(text_config, "max_position_embeddings", None)
    examples, skipped = make_examples(triplets, tokenizer, options, limit)
    for reason, times in skipped.items():
        log.warning("left out %d of %d triplets: %s", times, len(triplets), reason)
    if not examples:
        raise CaptureError(f"none of {len(triplets)} triplets gives rows: {skipped}")
    sites = find_sites(model)
    sums = {(site.layer, site.channel): HeadMoments.zeros(*site.shape) for site in sites}
    count, dtype = _run(sites, examples, sums, batch_tokens, progress)
    header = {
        "model": model_identity(model),
        "tokenizer": tokenizer_hash(tokenizer),
        "pairs": triplets_hash(triplets),
        "options": options.describe(),
        "triplets": len(examples),
        "skipped": sum(skipped.values()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    moments = Moments(count, sums, header)
    moments.check_finite()
    return moments


def _options(options: CaptureOptions | None, named: dict[str, Any]) -> CaptureOptions:
    if options is not None and named:
        raise ParameterError(f"give options or {', '.join(named)}, not both")
    try:
        return options or CaptureOptions(**named)
    except TypeError as error:
        raise ParameterError(f"unknown capture option: {error}") from error


def _run(
    sites: Sites,
    examples: Sequence[Example],
    sums: dict[tuple[int, Channel], HeadMoments],
    batch_tokens: int,
    progress: bool,
) -> tuple[int, torch.dtype]:
    """Stream windows of examples through the decoder; returns N and the precision of the model's numbers."""
    from tqdm.auto import tqdm

    ordered = sorted(examples, key=lambda example: example.length)
    count, dtype = 0, torch.float32
    with tqdm(total=3 * len(ordered), desc="capture", unit="prompt", disable=None if progress else True) as bar:
        for begin in range(0, len(ordered), _WINDOW):
            window = _Window(sites, ordered[begin : begin + _WINDOW])
            with window.collecting():
                for batch in window.batches(batch_tokens):
                    window.forward(batch)
                    bar.update(len(batch))
            window.add_to(sums)
            count, dtype = count + window.rows, window.dtype
    return count, dtype


class _Window:
    """Some examples, run shortest first under all three conditions, and the rows they leave."""

    def __init__(self, sites: Sites, examples: Sequence[Example]) -> None:
        self.sites = sites
        starts = [0]
        for example in examples:
            starts.append(starts[-1] + len(example.rows[0]))
        self.rows = starts[-1]
        # condition, first row in the window, ids, positions of rows
        self.jobs = [
            (condition, start, example.ids[condition], example.rows[condition])
            for example, start in zip(examples, starts, strict=False)
            for condition in range(3)
        ]
        self.jobs.sort(key=lambda job: len(job[2]))
        self.found = {
            (site.layer, site.channel): torch.empty(3, self.rows, *site.shape, dtype=torch.float32) for site in sites
        }
        self.dtype = torch.float32  # of the model's own numbers, seen in the first pass
        self.take: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self.put: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def batches(self, batch_tokens: int) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for job in self.jobs:
            if batch and (len(batch) + 1) * len(job[2]) > batch_tokens:
                yield batch
                batch = []
            batch.append(job)
        yield batch

    def forward(self, batch: list[Any]) -> None:
        width = max(len(ids) for _, _, ids, _ in batch)
        weight = getattr(self.sites.embedding, "weight", None)
        device = weight.device if weight is not None and weight.device.type != "meta" else torch.device("cpu")
        # Padding on the right: a causal model never looks at it, and positions start at 0 for everyone.
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        where: list[tuple[int, int, int, int]] = []
        for number, (condition, start, tokens, positions) in enumerate(batch):
            ids[number, : len(tokens)] = torch.tensor(tokens)
            mask[number, : len(tokens)] = 1
            where += [(number, place, condition, start + i) for i, place in enumerate(positions)]
        index = torch.tensor(where).T
        self.take, self.put = (index[0].to(device), index[1].to(device)), (index[2], index[3])
        with torch.no_grad():
            self.sites.decoder(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        handles = [site.module.register_forward_hook(self._collector(site)) for site in self.sites]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _collector(self, site: Site) -> Any:
        buffer = self.found[site.layer, site.channel]

        def collect(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self.dtype = output.dtype
            samples, places = (part.to(output.device) for part in self.take)
            buffer[self.put] = site.layout.view(output)[samples, places].to("cpu", torch.float32)

        return collect

    def add_to(self, sums: dict[tuple[int, Channel], HeadMoments]) -> None:
        for site in self.sites:
            neutral, positive, negative = self.found[site.layer, site.channel]
            negative = _without_rounding(positive, negative, self.dtype)
            sums[site.layer, site.channel].add_rows(neutral, positive, negative)


def _without_rounding(positive: torch.Tensor, negative: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """h- with rows set equal to h+ where they differ by no more than the model's own rounding.

    Keys of layer 0 depend on the token alone, so their contrast is 0; matrix products of different batch
    shapes round differently and would leave noise there, and an arbitrary subspace of it.
    """
    # Full precision accumulates many small roundings; half precision rounds rarely, but by a whole step.
    steps = 16 if torch.finfo(dtype).bits >= 32 else 0.5
    gap = (positive - negative).norm(dim=-1, keepdim=True)
    same = gap <= steps * torch.finfo(dtype).eps * positive.norm(dim=-1, keepdim=True)
    return torch.where(same, positive, negative)
