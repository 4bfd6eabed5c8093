from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from prism_delta.errors import MarkupError, PromptError, SpanError
from prism_delta.prompt import Prompt, Span
from tokenizers_for_tests import byte_level


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((-1, 2), "not a range of characters"),
        ((2, 2), "not a range of characters"),
        ((3, 2), "not a range of characters"),
        ((0.0, 2), "span start must be an integer, found 0.0"),
        ((0, "2"), "span end must be an integer, found '2'"),
        ((False, 2), "span start must be an integer, found False"),
        ((0, 2, "1"), "span strength must be a number, found '1'"),
        ((0, 2, True), "span strength must be a number, found True"),
        ((0, 2, None), "span strength must be a number, found None"),
        ((0, 2, math.nan), "span strength must be finite, found nan"),
        ((0, 2, -math.inf), "span strength must be finite, found -inf"),
        ((0, 2, 10**400), "span strength must be finite"),
    ],
)
def test_span_refuses(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(SpanError, match=reason):
        Span(*arguments)


@pytest.mark.parametrize("strength", [0, 1, -2, 0.5, -0.0, 1e30])
def test_span_takes_any_finite_strength(strength: float) -> None:
    assert Span(0, 1, strength).strength == strength


def test_span_has_strength_one_unless_told() -> None:
    assert Span(0, 1) == Span(0, 1, 1.0)


@pytest.mark.parametrize(
    ("text", "spans", "error", "reason"),
    [
        ("", (), PromptError, "the prompt is empty"),
        (None, (), PromptError, "a prompt is text, found NoneType"),
        (b"a", (), PromptError, "a prompt is text, found bytes"),
        ("ab", [Span(0, 3)], SpanError, r"span \[0, 3\) is out of range: the text has 2 characters"),
        ("ab", [Span(0, 1), Span(5, 6)], SpanError, r"span \[5, 6\) is out of range"),
        ("a \n\tb", [Span(1, 4)], SpanError, "holds only white space"),
        ("a\u00a0\u3000b", [Span(1, 3)], SpanError, "holds only white space"),
        ("ab", [(0, 1)], SpanError, r"spans must be Span objects, found \(0, 1\)"),
    ],
)
def test_prompt_refuses(text: Any, spans: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        Prompt(text, spans)


@pytest.mark.parametrize("text", [None, 3, b"**a**"])
def test_parse_refuses_what_is_not_text(text: Any) -> None:
    with pytest.raises(PromptError, match="a prompt is text"):
        Prompt.parse(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("a **b**",), Prompt("a b", [Span(2, 3)])),
        (("a **b**", "none"), Prompt("a **b**")),
        (('a <hl strength="2">b</hl>', "tags"), Prompt("a b", [Span(2, 3, 2.0)])),
        (("plain",), Prompt("plain")),
    ],
)
def test_parse(arguments: tuple[Any, ...], expected: Prompt) -> None:
    assert Prompt.parse(*arguments) == expected


def test_parse_passes_special_tokens_on() -> None:
    assert Prompt.parse("a", special_tokens=False) == Prompt("a", special_tokens=False)
    assert Prompt.parse("a").special_tokens


def test_parse_reports_broken_markup_and_an_empty_prompt() -> None:
    with pytest.raises(MarkupError):
        Prompt.parse("a **b")
    with pytest.raises(PromptError, match="the prompt is empty"):
        Prompt.parse("")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [0, 0, 0, 0]),
        ([Span(1, 3, 2)], [0, 2, 2, 0]),
        ([Span(0, 4), Span(1, 3, -1)], [1, -1, -1, 1]),
        ([Span(1, 3, -1), Span(0, 4)], [1, 1, 1, 1]),
        ([Span(0, 4), Span(1, 2, 0)], [1, 0, 1, 1]),
    ],
)
def test_the_later_span_covers_the_earlier(spans: list[Span], expected: list[float]) -> None:
    assert Prompt("abcd", spans).strength_at() == expected


def test_the_inner_tag_decides() -> None:
    prompt = Prompt.parse('<hl strength="2">a<hl strength="-1">b</hl>c</hl>', "tags")
    assert prompt.strength_at() == [2, -1, 2]


def test_prompts_are_values() -> None:
    prompt = Prompt("ab", [Span(0, 1)])
    assert prompt.spans == (Span(0, 1),)
    assert {prompt, Prompt("ab", (Span(0, 1),))} == {prompt}
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.text = "c"  # type: ignore[misc]


def test_chat_marks_the_rendered_text() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = byte_level(trim_offsets=False, chat_template=template)
    messages = [{"role": "user", "content": 'say <hl strength="2">hi</hl>'}]
    expected = Prompt("[user] say hi\n>", [Span(11, 13, 2.0)], special_tokens=False)
    assert Prompt.chat(messages, tokenizer, "tags") == expected
    without_reply = Prompt.chat(messages, tokenizer, "tags", add_generation_prompt=False)
    assert without_reply.text == "[user] say hi\n"
