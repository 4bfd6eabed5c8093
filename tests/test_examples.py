from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from prism_delta.errors import ChatTemplateError, ParameterError
from prism_delta.examples import CaptureOptions, Example, make_examples
from prism_delta.pairs import Triplet
from tokenizers_for_tests import KINDS, byte_level, pattern_level, shared

TRIPLET = Triplet("Anna was a nurse.", "a nurse", "Who was Anna?", "Who was Rome?")
TEMPLATE = "{% for m in messages %}<s>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"


def one(tokenizer: PreTrainedTokenizerFast, triplet: Triplet = TRIPLET, **options: Any) -> Example:
    examples, skipped = make_examples([triplet], tokenizer, CaptureOptions(**options))
    assert skipped == {}
    return examples[0]


def row_tokens(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[list[str]]:
    return [
        tokenizer.convert_ids_to_tokens([ids[place] for place in rows])
        for ids, rows in zip(example.ids, example.rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("given", "answer_tokens", "special_tokens"),
    [
        ({}, "all", True),
        ({"convention": "paper"}, "all", True),
        ({"convention": "reference"}, "reference", False),
        ({"convention": "reference", "answer_tokens": "last"}, "last", False),
        ({"convention": "reference", "special_tokens": True}, "reference", True),
        ({"convention": "paper", "answer_tokens": "reference"}, "reference", True),
        ({"convention": "paper", "special_tokens": False}, "all", False),
    ],
)
def test_the_convention_fills_in_what_is_not_given(
    given: dict[str, Any], answer_tokens: str, special_tokens: bool
) -> None:
    options = CaptureOptions(**given)
    assert (options.answer_tokens, options.special_tokens) == (answer_tokens, special_tokens)


def test_what_is_equal_in_effect_is_described_equally() -> None:
    by_name = CaptureOptions(convention="reference")
    by_hand = CaptureOptions(answer_tokens="reference", special_tokens=False)
    expected = {"answer_tokens": "reference", "special_tokens": False, "template": "base", "position": "answer"}
    assert by_name.describe() == by_hand.describe() == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"convention": "library"}, "convention must be one of paper, reference, found 'library'"),
        ({"convention": None}, "convention must be one of"),
        ({"answer_tokens": "first"}, "answer_tokens must be one of all, reference, last, found 'first'"),
        ({"template": "instruct"}, "template must be one of base, chat"),
        ({"position": "end"}, "position must be one of answer, assistant"),
        ({"position": "assistant"}, "position='assistant' needs template='chat'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        CaptureOptions(**options)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (
            {"special_tokens": False},
            [
                "Context: Anna was a nurse. ",
                "Question: Who was Anna?\nContext: Anna was a nurse.",
                "Question: Who was Rome?\nContext: Anna was a nurse.",
            ],
        ),
        (
            {},
            [
                "<s>Context: Anna was a nurse. ",
                "<s>Question: Who was Anna?\nContext: Anna was a nurse.",
                "<s>Question: Who was Rome?\nContext: Anna was a nurse.",
            ],
        ),
        (
            {"template": "chat"},
            [
                "<s>Context: Anna was a nurse.",
                "<s>Question: Who was Anna?\nContext: Anna was a nurse.",
                "<s>Question: Who was Rome?\nContext: Anna was a nurse.",
            ],
        ),
        (
            {"template": "chat", "position": "assistant"},
            [
                "<s>Context: Anna was a nurse.</s>",
                "<s>Question: Who was Anna?\nContext: Anna was a nurse.</s>",
                "<s>Question: Who was Rome?\nContext: Anna was a nurse.</s>",
            ],
        ),
    ],
    ids=["base", "base with BOS", "chat", "chat with reply"],
)
def test_the_three_conditions(options: dict[str, Any], texts: list[str]) -> None:
    tokenizer = byte_level(trim_offsets=False, bos=True, chat_template=TEMPLATE)
    example = one(tokenizer, **options)
    assert [tokenizer.decode(ids) for ids in example.ids] == texts
    assert example.length == max(map(len, example.ids))


@pytest.mark.parametrize(
    ("kind", "answer", "answer_tokens", "expected"),
    [
        ("trimmed", "a nurse", "all", ["Ġa", "Ġnurse"]),
        ("untrimmed", "a nurse", "all", ["Ġa", "Ġnurse"]),
        ("untrimmed", "A NURSE", "all", ["Ġa", "Ġnurse"]),
        ("untrimmed", "nurse.", "all", ["Ġnurse", "."]),
        ("untrimmed", "urse", "all", ["Ġnurse"]),
        ("untrimmed", " a ", "all", ["Ġa"]),
        ("untrimmed", "a nurse", "last", ["Ġnurse"]),
        ("trimmed", "a nurse", "reference", ["Ġa", "Ġnurse"]),
        # Offsets with the space in front: the published rule loses the first token ...
        ("untrimmed", "a nurse", "reference", ["Ġnurse"]),
        # ... unless nothing is left; then it allows one character in front, and at last one behind.
        ("untrimmed", "nurse", "reference", ["Ġnurse"]),
        ("untrimmed", "nurs", "reference", ["Ġnurse"]),
        ("trimmed", "nurs", "reference", ["Ġnurse"]),
        ("metaspace", "was a", "all", ["▁was", "▁a"]),
        ("metaspace", "was a", "reference", ["▁a"]),
        ("words", "a nurse", "all", ["a", "nurse"]),
    ],
)
@pytest.mark.parametrize("template", ["base", "chat"])
def test_rows(kind: str, answer: str, answer_tokens: Any, expected: list[str], template: Any) -> None:
    tokenizer = KINDS[kind](chat_template="{{ messages[0].content }}")
    triplet = Triplet("Anna was a nurse.", answer, "Who was Anna?", "Who was Rome?")
    example = one(tokenizer, triplet, answer_tokens=answer_tokens, template=template)
    assert row_tokens(example, tokenizer) == [expected] * 3


def test_rows_are_those_of_the_first_occurrence() -> None:
    tokenizer = shared("words")
    example = one(tokenizer, Triplet("The nurse was a nurse.", "nurse", "Who was Anna?", "Who was Rome?"))
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in example.ids]
    assert [list(rows) for rows in example.rows] == [[ids.index("nurse")] for ids in words]


def test_a_question_with_the_answer_does_not_take_its_rows() -> None:
    tokenizer = shared("words")
    example = one(tokenizer, Triplet("Anna was a nurse.", "nurse", "Who was the nurse?", "Who was Rome?"))
    assert [rows[-1] for rows in example.rows] == [len(ids) - 2 for ids in example.ids]


def test_the_assistant_position_is_the_last_token() -> None:
    tokenizer = byte_level(trim_offsets=False, bos=True, chat_template=TEMPLATE)
    example = one(tokenizer, template="chat", position="assistant")
    assert [list(rows) for rows in example.rows] == [[len(ids) - 1] for ids in example.ids]
    assert row_tokens(example, tokenizer) == [["</s>"]] * 3


def test_a_chat_template_writes_its_own_special_tokens() -> None:
    tokenizer = byte_level(trim_offsets=False, bos=True, chat_template=TEMPLATE)
    example = one(tokenizer, template="chat", special_tokens=True)
    assert [ids.count(tokenizer.bos_token_id) for ids in example.ids] == [1, 1, 1]


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        one(byte_level(trim_offsets=False), template="chat")


# A context that this tokenizer joins with "Context:" at the start of the text, and only there.
JOINED = r"\AContext: ab cd|\S+"


@pytest.mark.parametrize(
    ("tokenizer", "triplet", "max_length", "reason"),
    [
        (pattern_level(r"\w+", dropping="xyz"), Triplet("say xyz now", "xyz", "q", "r"), None, "no answer token"),
        (
            pattern_level(JOINED),
            Triplet("ab cd", "ab cd", "q", "r"),
            None,
            "answer tokenized differently under the three conditions",
        ),
        (pattern_level(r"\w+"), Triplet("a b c", "b", "d e", "f g h"), 7, "longer than the model's 7 tokens"),
    ],
)
def test_triplets_without_comparable_rows_are_left_out_and_counted(
    tokenizer: PreTrainedTokenizerFast, triplet: Triplet, max_length: int | None, reason: str
) -> None:
    good = Triplet("ok", "ok", "q", "r")
    examples, skipped = make_examples([triplet, good, triplet], tokenizer, CaptureOptions(), max_length)
    assert len(examples) == 1
    assert skipped == {reason: 2}


def test_a_triplet_as_long_as_the_model_allows_is_kept() -> None:
    triplet = Triplet("a b c", "b", "d e", "f g h")
    examples, skipped = make_examples([triplet], pattern_level(r"\w+"), CaptureOptions(), 8)
    assert ([example.length for example in examples], skipped) == ([8], {})
