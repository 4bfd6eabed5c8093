"""Highlights through a chat template.

Templates trim contents, merge the system message, drop old reasoning. Instead of guessing, every span is
bracketed by two private characters, the template is rendered with and without them, and the two results
must agree once the private characters are taken out. Their places are then the spans, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import ChatTemplateError, PromptError
from .markup import RawSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ReadSpans: TypeAlias = Callable[[str], tuple[str, list[RawSpan]]]
"""From the content of a message to its plain text and the spans of that."""

_FIRST = 0xF0000  # a private-use plane: 65,534 characters that mean nothing to anyone
_MOST_SPANS = 0x7FFE


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    read_spans: ReadSpans,
    *,
    add_generation_prompt: bool = True,
    **options: Any,
) -> tuple[str, list[RawSpan]]:
    """Render messages to (text, spans of that text)."""
    if not messages:
        raise PromptError("the chat is empty; give at least one message")
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in options:
        raise ChatTemplateError("this tokenizer has no chat template; use a plain prompt, or pass chat_template=...")
    marker = _Bracketer(read_spans)
    bracketed = [_map_content(message, marker.bracketed) for message in messages]
    clean = [_map_content(message, marker.clean) for message in messages]

    def render(conversation: list[dict[str, Any]]) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **options
                )
            )
        except Exception as error:  # jinja2 and the template itself raise what they like
            raise ChatTemplateError(f"the chat template refused these messages: {error}") from error

    text = render(clean)
    if not marker.strengths:
        return text, []
    found = marker.locate(render(bracketed), text)
    return text, found


def _map_content(message: Mapping[str, Any], edit: Callable[[str], str]) -> dict[str, Any]:
    """A copy of the message with `edit` applied to each text of its content."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise PromptError(f"a chat message is a mapping with role and content, found {message!r}")
    copy = dict(message)
    content = copy.get("content")
    if isinstance(content, str):
        copy["content"] = edit(content)
    elif isinstance(content, list):
        copy["content"] = [
            {**part, "text": edit(part["text"])} if isinstance(part, Mapping) and "text" in part else part
            for part in content
        ]
    elif content is not None:
        raise PromptError(f"message content must be text or a list of parts, found {type(content).__name__}")
    return copy


class _Bracketer:
    """Puts private characters around the spans of contents and finds them again."""

    def __init__(self, read_spans: ReadSpans) -> None:
        self.read_spans = read_spans
        self.strengths: list[float] = []

    def clean(self, content: str) -> str:
        return self.read_spans(content)[0]

    def bracketed(self, content: str) -> str:
        text, spans = self.read_spans(content)
        if spans and any(_FIRST <= ord(character) < _FIRST + 2 * _MOST_SPANS for character in text):
            raise ChatTemplateError("a message holds private-use characters (U+F0000...); remove them first")
        if len(self.strengths) + len(spans) > _MOST_SPANS:
            raise ChatTemplateError(f"more than {_MOST_SPANS} highlights in one chat")
        inserts: list[tuple[int, int, str]] = []
        for start, end, strength in spans:
            # Brackets sit on visible characters, so that a template's trim meets the same white space.
            while text[start].isspace():
                start += 1
            while text[end - 1].isspace():
                end -= 1
            number = len(self.strengths)
            self.strengths.append(strength)
            inserts.append((start, 1, chr(_FIRST + 2 * number)))
            inserts.append((end, 0, chr(_FIRST + 2 * number + 1)))
        for place, _, character in sorted(inserts, reverse=True):
            text = text[:place] + character + text[place:]
        return text

    def locate(self, rendered: str, expected: str) -> list[RawSpan]:
        """Spans in `expected`, from the brackets in `rendered`; repeated content yields repeated spans."""
        kept: list[str] = []
        opened: dict[int, int] = {}
        unopened = False
        found: list[tuple[int, RawSpan]] = []
        for character in rendered:
            number, closing = divmod(ord(character) - _FIRST, 2)
            if not 0 <= number < len(self.strengths):
                kept.append(character)
            elif not closing:
                opened[number] = len(kept)
            elif number in opened:
                found.append((number, (opened.pop(number), len(kept), self.strengths[number])))
            else:
                unopened = True
        if "".join(kept) != expected or opened or unopened:
            raise ChatTemplateError(
                "the chat template changes the highlighted text itself, so its place cannot be known exactly; "
                "render the chat yourself and pass Prompt(text, spans, special_tokens=False)"
            )
        missing = set(range(len(self.strengths))) - {number for number, _ in found}
        if missing:
            raise ChatTemplateError(
                f"the chat template drops {len(missing)} of {len(self.strengths)} highlights "
                "(an old turn or a hidden part of it); highlight text that reaches the model"
            )
        return [span for _, span in sorted(found, key=lambda item: item[0])]
