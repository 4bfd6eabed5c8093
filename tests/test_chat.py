from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from prism_delta.chat import render_chat
from prism_delta.errors import ChatTemplateError, MarkupError, PromptError
from prism_delta.markup import parse_markup
from tokenizers_for_tests import byte_level

PLAIN = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

TRIMMING = PLAIN.replace("m.content", "m.content | trim")

# Gemma's way: no system role, its text opens the first user turn.
MERGING = """\
{%- if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}{% set lead = '' %}{% set turns = messages %}{% endif %}
{%- for m in turns %}<{{ m.role }}>{% if loop.first %}{{ lead }}{% endif %}{{ m.content | trim }}{% endfor %}"""

LAST_TURN = "{{ messages[-1].content }}"
# Re-reading: the question is asked twice.
TWICE = "{{ messages[0].content }}\nAgain: {{ messages[0].content }}"
UPPER = PLAIN.replace("m.content", "m.content | upper")
CAPITALIZE = PLAIN.replace("m.content", "m.content | capitalize")
REVERSING = PLAIN.replace("m.content", "m.content | reverse")
CUTTING = PLAIN.replace("m.content", "m.content[:6]")
WITHOUT_THOUGHTS = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
TOJSON = PLAIN.replace("m.content", "m.content | tojson")
TOJSON_ASCII = PLAIN.replace("m.content", "m.content | tojson(ensure_ascii=True)")
PARTS = """\
{%- for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    return byte_level(trim_offsets=False, chat_template=template)


def turns(*contents: Any, first: str = "user") -> list[dict[str, Any]]:
    roles = {"user": "assistant", "assistant": "user", "system": "user"}
    found = []
    for content in contents:
        found.append({"role": first, "content": content})
        first = roles[first]
    return found


def render(template: str | None, messages: Any, **options: Any) -> tuple[str, list[tuple[str, float]]]:
    """The text, and per span the characters it covers."""
    text, spans = render_chat(messages, tokenizer_with(template), stars, **options)
    return text, [(text[start:end], strength) for start, end, strength in spans]


def stars(content: str) -> tuple[str, list[tuple[int, int, float]]]:
    return parse_markup(content, "stars")


def tags(content: str) -> tuple[str, list[tuple[int, int, float]]]:
    return parse_markup(content, "tags")


@pytest.mark.parametrize(
    ("template", "messages", "text", "covered"),
    [
        (PLAIN, turns("hi"), "<|user|>hi<|end|><|assistant|>", []),
        (PLAIN, turns("a **b** c"), "<|user|>a b c<|end|><|assistant|>", ["b"]),
        (PLAIN, turns("**b**", "**b**"), "<|user|>b<|end|><|assistant|>b<|end|><|assistant|>", ["b", "b"]),
        (PLAIN, turns("**a****b**"), "<|user|>ab<|end|><|assistant|>", ["a", "b"]),
        (TRIMMING, turns("  **a** b \n"), "<|user|>a b<|end|><|assistant|>", ["a"]),
        (TRIMMING, turns("** a **"), "<|user|>a<|end|><|assistant|>", ["a"]),
        (TRIMMING, turns("\n** a\tb **\n"), "<|user|>a\tb<|end|><|assistant|>", ["a\tb"]),
        (MERGING, turns("Be **brief**. ", " **Hi** !", first="system"), "<user>Be brief. \n\nHi !", ["brief", "Hi"]),
        (MERGING, turns(" **Hi**", "Yes"), "<user>Hi<assistant>Yes", ["Hi"]),
        (LAST_TURN, turns("old", "older", "**new**"), "new", ["new"]),
        (TWICE, turns("a **b**"), "a b\nAgain: a b", ["b", "b"]),
        (TWICE, turns("**a** **b**"), "a b\nAgain: a b", ["a", "a", "b", "b"]),
        (UPPER, turns("say **straße**"), "<|user|>SAY STRASSE<|end|><|assistant|>", ["STRASSE"]),
        (TOJSON, turns('say "**é\n**"'), '<|user|>"say \\"é\\n\\""<|end|><|assistant|>', ["é"]),
        (WITHOUT_THOUGHTS, turns("q", "hm</think>**a**"), "<|user|>q<|end|><|assistant|>a<|end|><|assistant|>", ["a"]),
        (PARTS, turns([{"type": "text", "text": "a **b**"}, {"type": "image"}]), "<user>a b[image]", ["b"]),
        (PARTS, turns([{"type": "text", "text": "**a**"}, {"type": "text", "text": "**b**"}]), "<user>ab", ["a", "b"]),
    ],
)  # fmt: skip
def test_follows_highlights(template: str, messages: Any, text: str, covered: list[str]) -> None:
    assert render(template, messages) == (text, [(piece, 1.0) for piece in covered])


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CAPITALIZE, turns("**hello** there"), "changes the highlighted text itself"),
        (REVERSING, turns("a **b** c"), "changes the highlighted text itself"),
        (CUTTING, turns("ab **cd** ef"), "changes the highlighted text itself"),
        (TOJSON_ASCII, turns("a **b** c"), "changes the highlighted text itself"),
        (LAST_TURN, turns("**old**", "new"), "drops 1 of 1 highlights"),
        (LAST_TURN, turns("**old** **older**", "**new**"), "drops 2 of 3 highlights"),
        (WITHOUT_THOUGHTS, turns("q", "**hm**</think>a"), "drops 1 of 1 highlights"),
        (WITHOUT_THOUGHTS, turns("q", "**hm</think>a**"), "the chat template (changes|drops)"),
        # The second copy holds only the end of the highlight.
        (
            "{{ messages[0].content }}|{{ messages[0].content.split(',')[-1] }}",
            turns("**a, b**"),
            "the chat template changes",
        ),
        ("{{ raise_exception('no system role') }}", turns("a"), "refused these messages: no system role"),
        ("{{ messages[0].content.nothing.at_all }}", turns("a"), "refused these messages"),
        ("{% if %}", turns("a"), "refused these messages"),
        (None, turns("a"), "this tokenizer has no chat template"),
    ],
)
def test_raises_where_a_place_cannot_be_known(template: str | None, messages: Any, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        render(template, messages)


@pytest.mark.parametrize("template", [CAPITALIZE, REVERSING, CUTTING, TOJSON_ASCII])
def test_any_template_will_do_without_highlights(template: str) -> None:
    messages = turns("hello there")
    expected = tokenizer_with(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render(template, messages) == (expected, [])


@pytest.mark.parametrize(
    ("messages", "error", "reason"),
    [
        ([], PromptError, "the chat is empty"),
        (["hi"], PromptError, "a chat message is a mapping with role and content, found 'hi'"),
        ([{"content": "hi"}], PromptError, "a chat message is a mapping with role and content"),
        (turns(3), PromptError, "message content must be text or a list of parts, found int"),
        (turns("**a"), MarkupError, "never closed"),
    ],
)
def test_refuses_what_is_no_chat(messages: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        render(PLAIN, messages)


def test_nested_spans_keep_order_and_strength() -> None:
    messages = turns("x <hl strength=2> <hl strength=-1>a</hl> b<hl strength=3>c</hl></hl>")
    text, spans = render_chat(messages, tokenizer_with(TRIMMING), tags)
    assert [(text[start:end], strength) for start, end, strength in spans] == [("a bc", 2.0), ("a", -1.0), ("c", 3.0)]


def test_options_reach_the_template() -> None:
    template = "{% if shout %}!{% endif %}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    messages = turns("**a**")
    assert render(template, messages, shout=True) == ("!a>", [("a", 1.0)])
    assert render(template, messages, add_generation_prompt=False) == ("a", [("a", 1.0)])
    assert render(None, messages, chat_template=template) == ("a>", [("a", 1.0)])


def test_other_fields_of_a_message_reach_the_template() -> None:
    template = "{{ messages[0].name }}:{{ messages[0].content }}>{{ messages[1].call }}"
    messages = [{"role": "user", "content": "**a**", "name": "**Ann**"}, {"role": "assistant", "call": "f(2**3)"}]
    assert render(template, messages) == ("**Ann**:a>f(2**3)", [("a", 1.0)])


def test_messages_are_left_as_they_were() -> None:
    messages = turns("**a**", [{"type": "text", "text": "**b**"}])
    before = copy.deepcopy(messages)
    render(PARTS, messages)
    assert messages == before


@pytest.mark.parametrize("character", ["\U000f0000", "\U000f0001", "\U000ffffb"])
def test_private_characters_beside_a_highlight_are_refused(character: str) -> None:
    with pytest.raises(ChatTemplateError, match="private-use characters"):
        render(PLAIN, turns(f"{character} **a**"))


def test_private_characters_in_another_message_are_not_taken_for_a_highlight() -> None:
    with pytest.raises(ChatTemplateError):
        render(PLAIN, turns("\U000f0000b\U000f0001", "**a**"))


def test_private_characters_without_a_highlight_are_text_like_any_other() -> None:
    assert render(LAST_TURN, turns("icon \U000f0001")) == ("icon \U000f0001", [])


pieces = st.tuples(st.text(alphabet="ab \n'\"<é😀"), st.booleans()).filter(lambda item: item[0].strip() or not item[1])


@pytest.mark.parametrize(
    ("template", "written", "copies"),
    [(PLAIN, str, 1), (TRIMMING, str.strip, 1), (TWICE, str, 2)],
    ids=["plain", "trimming", "twice"],
)
def test_every_span_covers_its_own_text(template: str, written: Callable[[str], str], copies: int) -> None:
    tokenizer = tokenizer_with(template)

    @settings(deadline=None)
    @given(st.lists(pieces, min_size=1, max_size=5))
    def check(parts: list[tuple[str, bool]]) -> None:
        content = "".join(piece for piece, _ in parts)
        marked = "".join(f"**{piece}**" if is_span else piece for piece, is_span in parts)
        text, spans = render_chat(turns(marked), tokenizer, stars)
        expected = [piece.strip() for piece, is_span in parts for _ in range(copies) if is_span]
        assert [text[start:end] for start, end, _ in spans] == expected
        assert written(content) in text

    check()
