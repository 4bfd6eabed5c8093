from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from prism_delta.batch import Batch, encode, tokenize_with_offsets
from prism_delta.errors import BatchError, ParameterError, PrismError, PromptTooLongError, SpanError, TokenizerError
from prism_delta.prompt import Prompt, Span
from tokenizers_for_tests import KINDS, byte_level, pattern_level, shared

TAGGED = '<hl strength="2">Anna</hl> was<hl strength="-3"> a nurse</hl>'


@pytest.mark.parametrize(
    ("kind", "marked", "tokens", "strengths"),
    [
        ("trimmed", "Anna was a **nurse**", ["Anna", "Ġwas", "Ġa", "Ġnurse"], [0, 0, 0, 1]),
        ("untrimmed", "Anna was a **nurse**", ["Anna", "Ġwas", "Ġa", "Ġnurse"], [0, 0, 0, 1]),
        ("metaspace", "Anna was **a**", ["▁Anna", "▁was", "▁a"], [0, 0, 1]),
        ("words", "ANNA was a **Nurse**", ["anna", "was", "a", "nurse"], [0, 0, 0, 1]),
        # The space before a span belongs to the token after it: only what is visible decides.
        ("untrimmed", "Anna** was** a", ["Anna", "Ġwas", "Ġa"], [0, 1, 0]),
        ("untrimmed", "Anna **was **a", ["Anna", "Ġwas", "Ġa"], [0, 1, 0]),
        # A token that holds a part of a span, at its start, middle or end, belongs to it.
        ("untrimmed", "A**nna w**as a", ["Anna", "Ġwas", "Ġa"], [1, 1, 0]),
        ("words", "an**n**a was", ["anna", "was"], [1, 0]),
        # Tokens that share one character, each a part of its bytes.
        ("trimmed", "a**é**", ["a", "Ã", "©"], [0, 1, 1]),
        ("untrimmed", "a**é**", ["a", "Ã", "©"], [0, 1, 1]),
        # Tokens of white space alone, with offsets (trimmed: empty ones) inside the span.
        ("trimmed", "**was\n a**", ["was", "Ċ", "Ġa"], [1, 0, 1]),
        ("untrimmed", "**was\n a**", ["was", "Ċ", "Ġa"], [1, 0, 1]),
        ("bos", "**Anna** was", ["<s>", "Anna", "Ġwas"], [0, 1, 0]),
        ("words", "**xyzzy** was", ["<unk>", "was"], [1, 0]),
    ],
)  # fmt: skip
def test_a_token_takes_the_strength_of_its_visible_characters(
    kind: str, marked: str, tokens: list[str], strengths: list[float]
) -> None:
    batch = encode(marked, shared(kind))
    assert shared(kind).convert_ids_to_tokens(batch.input_ids[0]) == tokens
    assert batch.strengths.tolist() == [strengths]
    assert batch.attention_mask.tolist() == [[1] * len(tokens)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([Span(0, 4, 2), Span(8, 16, -3)], [2, 0, -3, -3]),
        ([Span(0, 2, 1), Span(2, 4, -2)], [-2, 0, 0, 0]),
        ([Span(0, 2, -2), Span(2, 4, 1)], [-2, 0, 0, 0]),
        ([Span(0, 2, 1), Span(2, 4, 0)], [1, 0, 0, 0]),
        ([Span(0, 16), Span(5, 8, 0)], [1, 0, 1, 1]),
        ([Span(0, 16, 0.5)], [0.5, 0.5, 0.5, 0.5]),
        ([], [0, 0, 0, 0]),
    ],
)
def test_the_strongest_strength_in_a_token_wins(spans: list[Span], expected: list[float]) -> None:
    batch = encode(Prompt("Anna was a nurse", spans), shared("untrimmed"))
    assert batch.strengths.tolist() == [expected]
    assert batch.highlighted == sum(value != 0 for value in expected)


@pytest.mark.parametrize(
    ("kind", "text", "span", "expected"),
    [
        ("untrimmed", "Anna was a nurse", Span(5, 8), [0, 1, 0, 0]),
        ("untrimmed", "Anna was a nurse", Span(5, 10), [0, 1, 1, 0]),
        # A token that straddles the end is left out ...
        ("untrimmed", "Anna was a nurse", Span(5, 9), [0, 1, 0, 0]),
        ("untrimmed", "Anna was a nurse", Span(5, 13), [0, 1, 1, 0]),
        # ... and the one character of slack in front takes a quote or a bracket too.
        ("untrimmed", "(was", Span(1, 4), [1, 1]),
        ("trimmed", "(was", Span(1, 4), [1, 1]),
        ("untrimmed", "((was", Span(2, 5), [0, 1, 1]),
        ("bos", "Anna was", Span(0, 4), [0, 1, 0]),
    ],
)
def test_the_reference_rule(kind: str, text: str, span: Span, expected: list[float]) -> None:
    assert encode(Prompt(text, [span]), shared(kind), rule="reference").strengths.tolist() == [expected]


def test_the_reference_rule_raises_where_it_finds_nothing() -> None:
    with pytest.raises(TokenizerError, match="under the reference rule no token lies inside 'nur'"):
        encode(Prompt("Anna was a nurse", [Span(11, 14)]), shared("untrimmed"), rule="reference")


@pytest.mark.parametrize(
    ("side", "ids", "mask", "strengths"),
    [
        ("left", [[7, 7, 1], [1, 2, 3]], [[0, 0, 1], [1, 1, 1]], [[0, 0, 1], [0, 0, 1]]),
        ("right", [[1, 7, 7], [1, 2, 3]], [[1, 0, 0], [1, 1, 1]], [[1, 0, 0], [0, 0, 1]]),
    ],
)
def test_padding(side: Any, ids: list[list[int]], mask: list[list[int]], strengths: list[list[float]]) -> None:
    tokenizer = byte_level(trim_offsets=False, pad_token="</s>")
    words = tokenizer.convert_tokens_to_ids(["Anna", "Ġwas", "Ġa"])
    real = {1: words[0], 2: words[1], 3: words[2], 7: tokenizer.pad_token_id}
    batch = encode(["**Anna**", "Anna was **a**"], tokenizer, padding_side=side)
    assert batch.input_ids.tolist() == [[real[number] for number in row] for row in ids]
    assert batch.attention_mask.tolist() == mask
    assert batch.strengths.tolist() == strengths


@pytest.mark.parametrize(
    ("options", "pad"),
    [
        ({"pad_token": "<unk>"}, "<unk>"),
        ({}, "</s>"),
        ({"eos_token": None}, None),
    ],
)
def test_padding_token(options: dict[str, Any], pad: str | None) -> None:
    tokenizer = byte_level(trim_offsets=False, **options)
    expected = 0 if pad is None else tokenizer.convert_tokens_to_ids(pad)
    assert encode(["Anna", "Anna was"], tokenizer).input_ids[0, 0] == expected


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_a_batch_is_the_same_as_alone(kind: str, side: Any) -> None:
    prompts = ["**Anna**", Prompt.parse(TAGGED, "tags"), "Rome", "She is **now** a pilot."]
    together = encode(prompts, shared(kind), padding_side=side)
    assert len(together) == 4
    for row, prompt in enumerate(prompts):
        alone = encode(prompt, shared(kind))
        kept = together.attention_mask[row] == 1
        assert together.input_ids[row][kept].tolist() == alone.input_ids[0].tolist()
        assert together.strengths[row][kept].tolist() == alone.strengths[0].tolist()
        assert not together.strengths[row][~kept].any()


def test_special_tokens_are_added_unless_the_text_holds_them() -> None:
    tokenizer = shared("bos")
    bos = tokenizer.bos_token_id
    assert encode(Prompt("Anna"), tokenizer).input_ids[0, 0] == bos
    assert bos not in encode(Prompt("Anna", special_tokens=False), tokenizer).input_ids
    written = encode(Prompt("<s>Anna", [Span(3, 7)], special_tokens=False), tokenizer)
    assert written.input_ids[0].tolist() == encode("Anna", tokenizer).input_ids[0].tolist()
    assert written.strengths.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("max_length", "truncation", "kept"),
    [
        (5, "error", slice(0, 5)),
        (9, "left", slice(0, 5)),
        (4, "left", slice(1, 5)),
        (3, "left", slice(2, 5)),
        (4, "right", slice(0, 4)),
        (3, "right", slice(0, 3)),
    ],
)
def test_truncation(max_length: int, truncation: Any, kept: slice) -> None:
    marked = "Anna was **a** nurse."
    whole = encode(marked, shared("trimmed"))
    cut = encode(marked, shared("trimmed"), max_length=max_length, truncation=truncation)
    assert whole.input_ids.shape == (1, 5)
    assert cut.input_ids.tolist() == whole.input_ids[:, kept].tolist()
    assert cut.strengths.tolist() == whole.strengths[:, kept].tolist()


@pytest.mark.parametrize(
    ("max_length", "truncation", "error", "reason"),
    [
        (4, "error", PromptTooLongError, r"has 5 tokens, 1 more than allowed \(4\)"),
        (2, "left", PromptTooLongError, "cutting 3 tokens at the left would drop 1 highlighted tokens"),
        (2, "right", PromptTooLongError, "cutting 3 tokens at the right would drop 1 highlighted tokens"),
        (4, "middle", ParameterError, "truncation must be 'error', 'left' or 'right', found 'middle'"),
        (0, "left", ParameterError, "max_length must be at least 1, found 0"),
    ],
)
def test_truncation_never_loses_a_highlight(
    max_length: int, truncation: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        encode("Anna was **a** nurse.", shared("trimmed"), max_length=max_length, truncation=truncation)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "reason"),
    [
        ([], {}, BatchError, "no prompts to encode"),
        ("Anna", {"padding_side": "center"}, ParameterError, "padding_side must be 'left' or 'right', found 'center'"),
        ("Anna", {"rule": "any"}, ParameterError, "unknown token rule 'any'"),
        (Prompt(" "), {}, TokenizerError, "the tokenizer made no tokens of ' '"),
    ],
)
def test_encode_refuses(prompts: Any, options: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        encode(prompts, shared("words"), **options)


def test_a_highlight_the_tokenizer_drops_is_refused() -> None:
    tokenizer = pattern_level(r"\w+", dropping="xyz")
    assert encode("a **xyzb** c", tokenizer).strengths.tolist() == [[0, 1, 0]]
    with pytest.raises(TokenizerError, match="the tokenizer drops the highlighted text 'xyz'"):
        encode("a **xyz** c", tokenizer)
    with pytest.raises(TokenizerError, match=r"the tokenizer drops the highlighted text '\.\.\.'"):
        encode("**a** **...** c", tokenizer)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError, match="ByT5Tokenizer is a slow tokenizer"):
        encode("**a**", ByT5Tokenizer(extra_ids=0))


def test_text_that_no_tokenizer_reads_is_refused() -> None:
    # Half of a surrogate pair: JSON input can hold it, UTF-8 cannot.
    with pytest.raises(PrismError):
        encode(Prompt("a \ud800", [Span(0, 1)]), shared("untrimmed"))


def test_a_strength_beyond_float32_is_refused() -> None:
    with pytest.raises((SpanError, BatchError)):
        encode(Prompt("a", [Span(0, 1, 1e39)]), shared("untrimmed"))


def test_offsets_are_those_of_the_text() -> None:
    ids, offsets = tokenize_with_offsets("Anna was", shared("bos"), special_tokens=True)
    assert shared("bos").convert_ids_to_tokens(ids) == ["<s>", "Anna", "Ġwas"]
    assert offsets == [(0, 0), (0, 4), (4, 8)]


def test_from_ids() -> None:
    batch = Batch.from_ids([[1, 2], [3, 4]], [[0, 0.5], [0, -1]], [[1, 1], [0, 1]])  # type: ignore[arg-type]
    assert batch.inputs["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert batch.strengths.dtype == torch.float32
    assert (len(batch), batch.highlighted) == (2, 2)


def test_from_ids_attends_to_everything_unless_told() -> None:
    assert Batch.from_ids(torch.tensor([[1, 2]]), torch.zeros(1, 2)).attention_mask.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("ids", "strengths", "mask", "reason"),
    [
        ([1, 2], [0, 0], None, r"input_ids must be \[batch, token\] and not empty, found \[2\]"),
        ([[]], [[]], None, r"not empty, found \[1, 0\]"),
        ([[1.0]], [[0]], None, "input_ids must be integers, found torch.float32"),
        ([[1, 2]], [[0]], None, r"strengths has shape \[1, 1\], input_ids \[1, 2\]"),
        ([[1, 2]], [[0, 0]], [[1]], r"attention_mask has shape \[1, 1\], input_ids \[1, 2\]"),
        ([[1]], [[math.nan]], None, "strengths must be finite"),
        ([[1]], [[math.inf]], None, "strengths must be finite"),
        ([[1, 2]], [[1, 1]], [[0, 1]], "padding cannot be highlighted"),
    ],
)
def test_from_ids_refuses(ids: Any, strengths: Any, mask: Any, reason: str) -> None:
    with pytest.raises(BatchError, match=reason):
        Batch.from_ids(ids, strengths, mask)


def test_strengths_stay_on_the_cpu() -> None:
    batch = encode("**Anna**", shared("trimmed"), device="meta")
    places = (batch.input_ids, batch.attention_mask, batch.strengths)
    assert [tensor.device.type for tensor in places] == ["meta", "meta", "cpu"]


prompts = st.lists(
    st.tuples(st.text(alphabet=" \nAnnawsurePi.é日😀İ", max_size=6), st.sampled_from([None, 1.0, 2.0, -1.5])),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_tokens_with_visible_characters_of_a_span_have_its_strength(kind: str) -> None:
    tokenizer = shared(kind)

    @settings(deadline=None)
    @given(prompts)
    def check(parts: list[tuple[str, float | None]]) -> None:
        text, spans, of_character = "", [], {}
        for piece, strength in parts:
            if strength is not None and piece.strip():
                spans.append(Span(len(text), len(text + piece), strength))
                visible = (i for i, character in enumerate(piece, len(text)) if not character.isspace())
                of_character |= dict.fromkeys(visible, strength)
            text += piece
        if not text.strip():
            return
        batch = encode(Prompt(text, spans), tokenizer)
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        held = [{of_character[i] for i in range(start, end) if i in of_character} for start, end in offsets]
        for strength, inside in zip(batch.strengths[0].tolist(), held, strict=True):
            assert strength in inside or (not inside and strength == 0)
            assert abs(strength) == max(map(abs, inside), default=0)
        highlighted = {
            i for (start, end), s in zip(offsets, batch.strengths[0], strict=True) if s for i in range(start, end)
        }
        assert set(of_character) <= highlighted

    check()
