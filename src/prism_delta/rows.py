"""Which tokens of a pass are highlighted, and which edits a reused KV cache already carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import SteeringError

_MARK = "_prism_delta_edits"


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Highlighted tokens of one pass: (sample, place in the pass) and strength, 12 bytes a token.

    The pass begins at slot `start` and holds every prompt `copies` times, each next to itself, as generate()
    lays them out: row r of the batch becomes samples r * copies ... + copies - 1.
    """

    samples: torch.Tensor
    places: torch.Tensor
    strengths: torch.Tensor
    start: int
    copies: int
    moved: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def of_pass(cls, strengths: torch.Tensor, start: int, tokens: int, copies: int) -> TokenRows | None:
        """The rows of a pass over slots `start` to `start + tokens` with every prompt `copies` times; None if none."""
        origin, places = strengths[:, start : start + tokens].nonzero(as_tuple=True)
        if not len(origin):
            return None
        values = strengths[origin, places + start].repeat_interleave(copies)
        samples = (origin[:, None] * copies + torch.arange(copies)).flatten()
        return cls(samples.int(), places.repeat_interleave(copies).int(), values, start, copies)

    @property
    def origin(self) -> torch.Tensor:
        """The row of the batch that each sample comes from."""
        return self.samples // self.copies

    @property
    def slots(self) -> torch.Tensor:
        """Places in the whole prompt."""
        return self.places + self.start

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """(samples, places, strengths) on a device, moved there once."""
        if (device, dtype) not in self.moved:
            parts = (self.samples, self.places, self.strengths.to(dtype))
            self.moved[device, dtype] = tuple(part.to(device, non_blocking=True) for part in parts)
        return self.moved[device, dtype]


def mark_cache(cache: Any, fingerprint: str, strengths: torch.Tensor) -> None:
    """Note on a KV cache which edits its entries carry. A plain attribute: copies of the cache keep it."""
    setattr(cache, _MARK, (fingerprint, strengths))


def check_history(cache: Any, fingerprint: str, wanted: torch.Tensor) -> None:
    """A reused cache must hold exactly the edits asked for in the slots it covers, `wanted` [batch, slot]."""
    known, held = getattr(cache, _MARK, (fingerprint, torch.zeros(1, 0)))
    start = wanted.shape[1]
    padded = torch.zeros(held.shape[0], start)
    width = min(start, held.shape[1])
    padded[:, :width] = held[:, :width]
    if padded.shape[0] not in (1, wanted.shape[0]):
        raise SteeringError(
            f"the given KV cache was filled for {padded.shape[0]} prompts, the batch has {wanted.shape[0]}"
        )
    same_plan = known == fingerprint or not bool(padded.any())
    if not same_plan or not torch.equal(padded.expand_as(wanted), wanted):
        raise SteeringError(
            f"the given KV cache already holds {start} tokens of this prompt, written with other highlights, another "
            "strength or another plan (or none); fill it inside a steer block with the same ones, or start from an "
            "empty cache"
        )
