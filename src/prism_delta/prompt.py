"""What the user marks: spans of a text, and the prompt that carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import PromptError, SpanError
from .markup import Markup, parse_markup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` (included) to `end` (excluded) of a text, highlighted with a strength.

    strength: 0 = no edit, 1 = the plan's recommended setting, 2 = twice that, negative = de-emphasise.
    """

    start: int
    end: int
    strength: float = 1.0

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpanError(f"span {name} must be an integer, found {value!r}")
        if isinstance(self.strength, bool) or not isinstance(self.strength, int | float):
            raise SpanError(f"span strength must be a number, found {self.strength!r}")
        if not abs(self.strength) <= _LARGEST:  # also false for NaN
            raise SpanError(f"span strength must be finite, found {str(self.strength)[:20]}")
        if not 0 <= self.start < self.end:
            raise SpanError(f"span [{self.start}, {self.end}) is not a range of characters; expected 0 <= start < end")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its highlighted spans.

    Where spans overlap, the later one in `spans` decides, as paint covers paint. In nested tags the inner
    tag comes later, so the inner one decides.

    special_tokens: let the tokenizer add its own (BOS, ...). False for text that holds them already,
    such as a rendered chat template.
    """

    text: str
    spans: tuple[Span, ...] = ()
    special_tokens: bool = True

    def __init__(self, text: str, spans: Sequence[Span] = (), special_tokens: bool = True) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "spans", tuple(spans))
        object.__setattr__(self, "special_tokens", special_tokens)
        if not isinstance(text, str):
            raise PromptError(f"a prompt is text, found {type(text).__name__}")
        if not text:
            raise PromptError("the prompt is empty; give at least one character")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError("the prompt holds half a surrogate pair, which is no character; repair its encoding")
        for span in self.spans:
            if not isinstance(span, Span):
                raise SpanError(f"spans must be Span objects, found {span!r}")
            if span.end > len(text):
                raise SpanError(f"span [{span.start}, {span.end}) is out of range: the text has {len(text)} characters")
            if not text[span.start : span.end].strip():
                raise SpanError(f"span [{span.start}, {span.end}) holds only white space; highlight visible characters")

    @classmethod
    def parse(cls, text: str, markup: Markup = "stars", *, special_tokens: bool = True) -> Prompt:
        """Read markup: `**span**` (stars), `<hl strength="2">span</hl>` (tags), or none at all."""
        if not isinstance(text, str):
            raise PromptError(f"a prompt is text, found {type(text).__name__}")
        clean, found = parse_markup(text, markup)
        return cls(clean, [Span(*item) for item in found], special_tokens)

    @classmethod
    def chat(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        markup: Markup = "stars",
        *,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> Prompt:
        """Render messages whose contents hold markup through the chat template, spans included."""
        from .chat import render_chat

        text, found = render_chat(
            messages,
            tokenizer,
            lambda content: parse_markup(content, markup),
            add_generation_prompt=add_generation_prompt,
            **template_options,
        )
        return cls(text, [Span(*item) for item in found], special_tokens=False)

    def strength_at(self) -> list[float]:
        """The strength of every character of the text."""
        strengths = [0.0] * len(self.text)
        for span in self.spans:
            strengths[span.start : span.end] = [float(span.strength)] * (span.end - span.start)
        return strengths
