"""From prompts to tensors: which token belongs to which highlight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from .errors import BatchError, ParameterError, PromptTooLongError, TokenizerError
from .prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenRule: TypeAlias = Literal["visible", "reference"]
Truncation: TypeAlias = Literal["error", "left", "right"]


@dataclass(frozen=True)
class Batch:
    """Token ids, attention mask and a strength for every token, all [batch, token].

    `strengths` stays on the CPU in float32: the steering kernel reads it while planning and must not make
    the host wait for a device.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    strengths: torch.Tensor

    @classmethod
    def from_ids(
        cls,
        input_ids: torch.Tensor,
        strengths: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> Batch:
        """A batch made without a tokenizer; all tensors are [batch, token]."""
        ids = torch.as_tensor(input_ids)
        values = torch.as_tensor(strengths)
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        if ids.ndim != 2 or ids.numel() == 0:
            raise BatchError(f"input_ids must be [batch, token] and not empty, found {list(ids.shape)}")
        if ids.is_floating_point():
            raise BatchError(f"input_ids must be integers, found {ids.dtype}")
        for name, tensor in (("strengths", values), ("attention_mask", mask)):
            if tensor.shape != ids.shape:
                raise BatchError(
                    f"{name} has shape {list(tensor.shape)}, input_ids {list(ids.shape)}; they must be equal"
                )
        values = values.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise BatchError("strengths must be finite numbers")
        if bool((values[mask.to("cpu") == 0] != 0).any()):
            raise BatchError("a padding token (attention_mask 0) has a strength; padding cannot be highlighted")
        return cls(ids, mask, values)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What `model(...)` and `model.generate(...)` take."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def highlighted(self) -> int:
        """How many tokens have a strength other than 0."""
        return int((self.strengths != 0).sum())

    def to(self, device: torch.device | str) -> Batch:
        return replace(self, input_ids=self.input_ids.to(device), attention_mask=self.attention_mask.to(device))

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


def encode(
    prompts: Prompt | str | Sequence[Prompt | str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    padding_side: Literal["left", "right"] = "left",
    rule: TokenRule = "visible",
    max_length: int | None = None,
    truncation: Truncation = "error",
    device: torch.device | str | None = None,
) -> Batch:
    """Tokenize prompts into a padded Batch. A string is a prompt with `**` markup.

    rule: "visible" gives a token to a span if it holds at least one of the span's non-space characters;
    "reference" is the published code's rule (token inside the span, one character of slack in front).
    max_length, truncation: a longer prompt is an error, or loses tokens at that side; losing a highlighted
    token is always an error.
    """
    if padding_side not in ("left", "right"):
        raise ParameterError(f"padding_side must be 'left' or 'right', found {padding_side!r}")
    if truncation not in ("error", "left", "right"):
        raise ParameterError(f"truncation must be 'error', 'left' or 'right', found {truncation!r}")
    items = [prompts] if isinstance(prompts, Prompt | str) else list(prompts)
    if not items:
        raise BatchError("no prompts to encode; give at least one")
    rows = [_encode_one(_as_prompt(item), tokenizer, rule) for item in items]
    if max_length is not None:
        rows = [_cut(ids, strengths, max_length, truncation) for ids, strengths in rows]
    width = max(len(ids) for ids, _ in rows)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    shape = (len(rows), width)
    input_ids = torch.full(shape, 0 if pad_id is None else int(pad_id), dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    values = torch.zeros(shape, dtype=torch.float32)
    for row, (ids, strengths) in enumerate(rows):
        place = slice(width - len(ids), width) if padding_side == "left" else slice(0, len(ids))
        input_ids[row, place] = torch.tensor(ids)
        mask[row, place] = 1
        values[row, place] = torch.tensor(strengths)
    batch = Batch(input_ids, mask, values)
    return batch if device is None else batch.to(device)


def _as_prompt(item: Prompt | str) -> Prompt:
    return item if isinstance(item, Prompt) else Prompt.parse(item)


def _encode_one(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, rule: TokenRule) -> tuple[list[int], list[float]]:
    ids, offsets = tokenize_with_offsets(prompt.text, tokenizer, special_tokens=prompt.special_tokens)
    if not ids:
        raise TokenizerError(f"the tokenizer made no tokens of {prompt.text[:40]!r}")
    if rule == "visible":
        return ids, _visible_strengths(prompt, offsets)
    if rule == "reference":
        return ids, _reference_strengths(prompt, offsets)
    raise ParameterError(f"unknown token rule {rule!r}; expected 'visible' or 'reference'")


def tokenize_with_offsets(
    text: str, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and their [start, end) characters in `text`."""
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError(
            f"{type(tokenizer).__name__} is a slow tokenizer and reports no character offsets, so highlights cannot "
            "be placed exactly; load the fast one (AutoTokenizer.from_pretrained(..., use_fast=True)), or build "
            "the batch yourself with Batch.from_ids"
        )
    # verbose=False: the length check belongs to the caller, not to a warning on stderr.
    encoded: Any = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _visible_strengths(prompt: Prompt, offsets: Sequence[tuple[int, int]]) -> list[float]:
    """A token takes the strongest strength among the visible characters it holds."""
    of_character = prompt.strength_at()
    result = []
    covered = [False] * len(prompt.text)
    for start, end in offsets:
        here = [of_character[i] for i in range(start, end) if not prompt.text[i].isspace()]
        covered[start:end] = [True] * (end - start)
        result.append(max(here, key=abs, default=0.0))
    for span in prompt.spans:
        if not any(covered[i] and not prompt.text[i].isspace() for i in range(span.start, span.end)):
            raise TokenizerError(
                f"the tokenizer drops the highlighted text {prompt.text[span.start : span.end]!r}; no token holds it"
            )
    return result


def _reference_strengths(prompt: Prompt, offsets: Sequence[tuple[int, int]]) -> list[float]:
    result = [0.0] * len(offsets)
    for span in prompt.spans:
        inside = [
            token
            for token, (start, end) in enumerate(offsets)
            if start >= span.start - 1 and end <= span.end and (start, end) != (0, 0)
        ]
        if not inside:
            raise TokenizerError(
                f"under the reference rule no token lies inside {prompt.text[span.start : span.end]!r}; "
                "use rule='visible'"
            )
        for token in inside:
            result[token] = float(span.strength)
    return result


def _cut(
    ids: list[int], strengths: list[float], max_length: int, truncation: Truncation
) -> tuple[list[int], list[float]]:
    if max_length < 1:
        raise ParameterError(f"max_length must be at least 1, found {max_length}")
    extra = len(ids) - max_length
    if extra <= 0:
        return ids, strengths
    if truncation == "error":
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens, {extra} more than allowed ({max_length}); shorten it, or pass "
            "truncation='left' or 'right'"
        )
    kept = slice(extra, None) if truncation == "left" else slice(0, max_length)
    lost = sum(value != 0 for value in strengths) - sum(value != 0 for value in strengths[kept])
    if lost:
        raise PromptTooLongError(
            f"cutting {extra} tokens at the {truncation} would drop {lost} highlighted tokens; shorten the prompt, "
            "cut the other side, or highlight what stays"
        )
    return ids[kept], strengths[kept]
