from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prism_delta.errors import MarkupError, ParameterError
from prism_delta.markup import parse_markup

S, T, N = "stars", "tags", "none"


@pytest.mark.parametrize(
    ("markup", "marked", "text", "spans"),
    [
        (S, "", "", []),
        (S, "plain", "plain", []),
        (S, "a **b** c", "a b c", [(2, 3, 1.0)]),
        (S, "**a** **b**", "a b", [(0, 1, 1.0), (2, 3, 1.0)]),
        (S, "**a****b**", "ab", [(0, 1, 1.0), (1, 2, 1.0)]),
        (S, "** a **", " a ", [(0, 3, 1.0)]),
        (S, "**two\nlines**", "two\nlines", [(0, 9, 1.0)]),
        (S, "2 * 3 * 4", "2 * 3 * 4", []),
        (S, r"2 \** 3", "2 ** 3", []),
        (S, r"**a \** b**", "a ** b", [(0, 6, 1.0)]),
        (S, r"\\**a**", "\\a", [(1, 2, 1.0)]),
        (S, r"\\\**", r"\**", []),
        (S, r"C:\new\dir \n \*", r"C:\new\dir \n \*", []),
        (S, "<hl>a</hl>", "<hl>a</hl>", []),
        (S, "**日本** é", "日本 é", [(0, 2, 1.0)]),
        (T, "a <hl>b</hl> c", "a b c", [(2, 3, 1.0)]),
        (T, '<hl strength="2.5">a</hl>', "a", [(0, 1, 2.5)]),
        (T, "<hl strength='-1'>a</hl>", "a", [(0, 1, -1.0)]),
        (T, "<hl strength=0>a</hl>", "a", [(0, 1, 0.0)]),
        (T, '<hl  strength = "1e-2" >a</hl>', "a", [(0, 1, 0.01)]),
        (T, "<hl>a <hl strength=3>b</hl> c</hl>", "a b c", [(0, 5, 1.0), (2, 3, 3.0)]),
        (T, "<hl><hl strength=2>a</hl></hl>", "a", [(0, 1, 1.0), (0, 1, 2.0)]),
        (T, "<hl><hl strength=2>a</hl>b</hl><hl>c</hl>", "abc", [(0, 2, 1.0), (0, 1, 2.0), (2, 3, 1.0)]),
        (T, "**bold** <b>x</b> <hlx>", "**bold** <b>x</b> <hlx>", []),
        (T, r"\<hl>a\</hl>", "<hl>a</hl>", []),
        (T, r"\<hl strength=2> <hl>\\</hl>", "<hl strength=2> \\", [(16, 17, 1.0)]),
        (T, "a < b > c <hl", "a < b > c <hl", []),
        (N, r"**a** <hl>b</hl> \** ", r"**a** <hl>b</hl> \** ", []),
    ],
)
def test_reads(markup: Any, marked: str, text: str, spans: list[tuple[int, int, float]]) -> None:
    assert parse_markup(marked, markup) == (text, spans)


@pytest.mark.parametrize(
    ("markup", "marked", "reason", "line", "column"),
    [
        (S, "a **b", "this highlight is never closed", 1, 3),
        (S, "**a** **b", "this highlight is never closed", 1, 7),
        (S, "one\ntwo **b\nthree", "this highlight is never closed", 2, 5),
        (S, "a ****", "this highlight holds no visible text", 1, 3),
        (S, "** \n\t**", "this highlight holds no visible text", 1, 1),
        (T, "<hl>a", "this highlight is never closed", 1, 1),
        (T, "<hl>a <hl>b</hl>", "this highlight is never closed", 1, 1),
        (T, "a</hl>", "this closes a highlight that was never opened", 1, 2),
        (T, "<hl>a</hl></hl>", "this closes a highlight that was never opened", 1, 11),
        (T, "<hl>a</hl >", "a closing tag is written </hl>", 1, 6),
        (T, "<hl></hl>", "this highlight holds no visible text", 1, 1),
        (T, "<hl>a<hl> </hl></hl>", "this highlight holds no visible text", 1, 6),
        (T, "<hl weight=2>a</hl>", 'expected <hl> or <hl strength="NUMBER">', 1, 1),
        (T, "<hl/>", 'expected <hl> or <hl strength="NUMBER">', 1, 1),
        (T, "<hl strength=2 strength=3>a</hl>", 'expected <hl> or <hl strength="NUMBER">', 1, 1),
        (T, "<hl strength=strong>a</hl>", "strength must be a finite number, found 'strong'", 1, 1),
        (T, '<hl strength="">a</hl>', "strength must be a finite number, found ''", 1, 1),
        (T, "<hl strength=nan>a</hl>", "strength must be a finite number, found 'nan'", 1, 1),
        (T, "<hl strength=-inf>a</hl>", "strength must be a finite number, found '-inf'", 1, 1),
        (T, "<hl strength=1e999>a</hl>", "strength must be a finite number, found '1e999'", 1, 1),
    ],
)
def test_refuses_and_names_the_place(markup: Any, marked: str, reason: str, line: int, column: int) -> None:
    with pytest.raises(MarkupError) as caught:
        parse_markup(marked, markup)
    assert str(caught.value).splitlines()[0] == f"{reason} (line {line}, column {column}):"


@pytest.mark.parametrize(
    ("markup", "marked", "excerpt", "escape"),
    [
        (S, "x" * 50 + "\nab **cd\nef", "ab **cd", r"\**"),
        (S, "." * 40 + "**" + "," * 40, "." * 30 + "**" + "," * 28, r"\**"),
        (S, "a\tb **c", "a b **c", r"\**"),
        (T, "ab <hl>cd", "ab <hl>cd", r"\<hl>"),
    ],
)
def test_an_error_shows_the_marker_and_how_to_escape_it(markup: Any, marked: str, excerpt: str, escape: str) -> None:
    with pytest.raises(MarkupError) as caught:
        parse_markup(marked, markup)
    _, shown, caret, advice = str(caught.value).splitlines()
    assert shown == f"  {excerpt}"
    assert shown[caret.index("^") :].startswith(("**", "<hl>"))
    assert advice == f"Write {escape} to keep the marker as text."


def test_an_unknown_markup_is_refused() -> None:
    with pytest.raises(ParameterError, match="unknown markup 'html'; expected one of stars, tags, none"):
        parse_markup("a", "html")  # type: ignore[arg-type]


def escaped(text: str, marker: str, *, before_marker: bool) -> str:
    """What a user writes to have `text` come out unchanged."""
    text = re.sub(rf"(\\*)({marker})", lambda match: match[1] * 2 + "\\" + match[2], text)
    slashes = len(text) - len(text.rstrip("\\"))
    return text + "\\" * slashes if before_marker else text


texts = st.lists(st.sampled_from([*"ab \\*<>\n/é😀", "**", "<hl>", "</hl>", "<hl strength=2>", "\\\\"])).map("".join)
visible_texts = texts.filter(str.strip)
strengths = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(st.lists(st.tuples(visible_texts, st.booleans())), texts)
def test_stars_round_trip(parts: list[tuple[str, bool]], tail: str) -> None:
    text, marked, spans = "", "", []
    for piece, is_span in parts:
        # Nothing can be written for a lone star before a marker: *** is always ** and then *.
        assume((len(piece) - len(piece.rstrip("*"))) % 2 == 0)
        if is_span:
            spans.append((len(text), len(text + piece), 1.0))
            marked += f"**{escaped(piece, re.escape('**'), before_marker=True)}**"
        else:
            marked += escaped(piece, re.escape("**"), before_marker=True) + r"\**"
            piece += "**"
        text += piece
    marked += escaped(tail, re.escape("**"), before_marker=False)
    assert parse_markup(marked, "stars") == (text + tail, spans)


nodes = st.recursive(
    visible_texts,
    lambda inner: st.tuples(strengths, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(nodes, max_size=5), texts)
def test_nested_tags_round_trip(tree: list[Any], tail: str) -> None:
    text: list[str] = []
    marked: list[str] = []
    spans: list[tuple[int, int, float] | None] = []
    pending: list[str] = []

    def write(marker: str) -> None:
        marked.append(escaped("".join(pending), "</?hl\\b[^<>]*>", before_marker=bool(marker)) + marker)
        pending.clear()

    def walk(node: Any) -> None:
        if isinstance(node, str):
            text.append(node)
            pending.append(node)
            return
        strength, children = node
        slot, start = len(spans), len("".join(text))
        spans.append(None)
        write(f'<hl strength="{strength!r}">')
        for child in children:
            walk(child)
        write("</hl>")
        spans[slot] = (start, len("".join(text)), strength)

    for node in [*tree, tail]:
        walk(node)
    write("")
    assert parse_markup("".join(marked), "tags") == ("".join(text), spans)
