"""From triplets to token ids: the three prompt templates and which tokens are the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .batch import tokenize_with_offsets
from .chat import render_chat
from .errors import ParameterError
from .pairs import Triplet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Convention: TypeAlias = Literal["paper", "reference"]
AnswerTokens: TypeAlias = Literal["all", "reference", "last"]
Template: TypeAlias = Literal["base", "chat"]
Position: TypeAlias = Literal["answer", "assistant"]

CHOICES: dict[str, tuple[str, ...]] = {
    "convention": ("paper", "reference"),
    "answer_tokens": ("all", "reference", "last"),
    "template": ("base", "chat"),
    "position": ("answer", "assistant"),
}


@dataclass(frozen=True)
class CaptureOptions:
    """How triplets become rows. The convention sets answer_tokens and special_tokens; an explicit value wins.

    answer_tokens: "all" tokens that hold a visible character of the answer (paper); "reference", the
    published code's rule, which loses the first token where offsets include the space before a word;
    "last", only the last token of the answer.
    special_tokens: tokenize with BOS and the like, as at inference (paper: True, reference: False).
    template: "base" for plain text, "chat" for one user turn in the model's chat template.
    position: rows at the "answer" tokens, or (chat only) at the "assistant" position, the token from which
    the first token of the reply is predicted.
    """

    convention: Convention = "paper"
    answer_tokens: AnswerTokens | None = None
    special_tokens: bool | None = None
    template: Template = "base"
    position: Position = "answer"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (value is None and name == "answer_tokens"):
                raise ParameterError(f"{name} must be one of {', '.join(choices)}, found {value!r}")
        reference = self.convention == "reference"
        if self.answer_tokens is None:
            object.__setattr__(self, "answer_tokens", "reference" if reference else "all")
        if self.special_tokens is None:
            object.__setattr__(self, "special_tokens", not reference)
        if self.position == "assistant" and self.template != "chat":
            raise ParameterError("position='assistant' needs template='chat'")

    def describe(self) -> dict[str, Any]:
        """What the rows depend on; the convention itself is only a shorthand."""
        return {name: value for name, value in asdict(self).items() if name != "convention"}


@dataclass(frozen=True)
class Example:
    """Token ids and row positions of one triplet under the three conditions: neutral, relevant, irrelevant."""

    ids: tuple[list[int], list[int], list[int]]
    rows: tuple[list[int], list[int], list[int]]

    @property
    def length(self) -> int:
        return max(len(ids) for ids in self.ids)


def make_examples(
    triplets: Sequence[Triplet],
    tokenizer: PreTrainedTokenizerBase,
    options: CaptureOptions,
    max_length: int | None = None,
) -> tuple[list[Example], dict[str, int]]:
    """Examples, and how many triplets were left out for which reason."""
    examples: list[Example] = []
    skipped: dict[str, int] = {}
    for triplet in triplets:
        conditions = [_condition(triplet, question, tokenizer, options) for question in _questions(triplet)]
        ids, rows = zip(*conditions, strict=True)
        reason = _unusable(ids, rows, max_length)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            examples.append(Example(ids, rows))
    return examples, skipped


def _questions(triplet: Triplet) -> tuple[str | None, str, str]:
    return None, triplet.relevant, triplet.irrelevant


def _unusable(ids: Sequence[list[int]], rows: Sequence[list[int]], max_length: int | None) -> str | None:
    if not all(rows):
        return "no answer token"
    if len({len(places) for places in rows}) > 1:
        return "answer tokenized differently under the three conditions"
    if max_length is not None and max(map(len, ids)) > max_length:
        return f"longer than the model's {max_length} tokens"
    return None


def _condition(
    triplet: Triplet, question: str | None, tokenizer: PreTrainedTokenizerBase, options: CaptureOptions
) -> tuple[list[int], list[int]]:
    """Token ids and row positions under one condition."""
    lead = "Context: " if question is None else f"Question: {question}\nContext: "
    tail = " " if question is None and options.template == "base" else ""
    text = f"{lead}{triplet.context}{tail}"
    place = triplet.answer_place() or (0, 0)
    start, end = len(lead) + place[0], len(lead) + place[1]
    special_tokens = bool(options.special_tokens)
    if options.template == "chat":
        at_reply = options.position == "assistant"
        rendered, spans = render_chat(
            [{"role": "user", "content": text}],
            tokenizer,
            lambda content: (content, [(start, end, 1.0)]),
            add_generation_prompt=at_reply,
        )
        text, (start, end, _) = rendered, spans[0]
        special_tokens = False  # the template has written them
        if at_reply:
            ids, _ = tokenize_with_offsets(text, tokenizer, special_tokens=False)
            return ids, [len(ids) - 1]
    ids, offsets = tokenize_with_offsets(text, tokenizer, special_tokens=special_tokens)
    return ids, _answer_rows(text, offsets, start, end, options)


def _answer_rows(
    text: str, offsets: Sequence[tuple[int, int]], start: int, end: int, options: CaptureOptions
) -> list[int]:
    if options.answer_tokens == "reference":
        for first, last in ((start, end), (start - 1, end), (start - 1, end + 1)):
            inside = [i for i, (a, b) in enumerate(offsets) if a >= first and b <= last and a < b]
            if inside:
                return inside
        return []
    rows = [
        i for i, (a, b) in enumerate(offsets) if text[max(a, start) : min(b, end)].strip() and a < end and b > start
    ]
    return rows[-1:] if options.answer_tokens == "last" else rows
