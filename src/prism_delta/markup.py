"""The two ways to write highlights inside a text.

stars   `a **highlighted** word`. A backslash keeps the marker as text: `\\**`.
tags    `a <hl>highlighted</hl> word`, `<hl strength="2">`, nested at will; for text that holds Markdown.
        A backslash keeps the tag as text: `\\<hl>`, `\\</hl>`.
none    the text as it is.

Only a backslash directly before a marker is special (and `\\\\` there is one backslash), so ordinary
backslashes in prompts stay what they are.
"""

from __future__ import annotations

import math
import re
from typing import Literal, TypeAlias, get_args

from .errors import MarkupError, ParameterError

Markup: TypeAlias = Literal["stars", "tags", "none"]
RawSpan: TypeAlias = tuple[int, int, float]

_STARS = re.compile(r"(?P<slashes>\\*)(?P<marker>\*\*)")
_TAGS = re.compile(r"(?P<slashes>\\*)(?P<marker></?hl\b[^<>]*>)")
_STRENGTH = re.compile(r"""<hl\s+strength\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))\s*>""")


def parse_markup(text: str, markup: Markup) -> tuple[str, list[RawSpan]]:
    """Split marked text into plain text and (start, end, strength) ranges of it, outer before inner."""
    if markup == "none":
        return text, []
    if markup == "stars":
        return _Parser(text, _STARS).run()
    if markup == "tags":
        return _Parser(text, _TAGS).run()
    raise ParameterError(f"unknown markup {markup!r}; expected one of {', '.join(get_args(Markup))}")


class _Parser:
    """One pass over the markers of a text; holds what is open and what has been found."""

    def __init__(self, text: str, pattern: re.Pattern[str]) -> None:
        self.text, self.pattern = text, pattern
        self.pieces: list[str] = []
        self.length = 0
        self.open: list[tuple[int, int, float, int]] = []  # slot in found, start, strength, source place
        self.found: list[RawSpan | None] = []

    def run(self) -> tuple[str, list[RawSpan]]:
        cursor = 0
        for match in self.pattern.finditer(self.text):
            slashes = len(match["slashes"])
            self._take(self.text[cursor : match.start()] + "\\" * (slashes // 2))
            if slashes % 2:
                self._take(match["marker"])
            else:
                self._marker(match["marker"], match.start("marker"))
            cursor = match.end()
        self._take(self.text[cursor:])
        if self.open:
            raise self._error(self.open[-1][3], "this highlight is never closed")
        return "".join(self.pieces), [span for span in self.found if span is not None]

    def _take(self, piece: str) -> None:
        self.pieces.append(piece)
        self.length += len(piece)

    def _marker(self, marker: str, place: int) -> None:
        if marker == "**":
            if self.open:
                self._close(place)
            else:
                self._open(1.0, place)
        elif marker.startswith("</"):
            if marker != "</hl>":
                raise self._error(place, "a closing tag is written </hl>")
            if not self.open:
                raise self._error(place, "this closes a highlight that was never opened")
            self._close(place)
        else:
            self._open(self._strength(marker, place), place)

    def _open(self, strength: float, place: int) -> None:
        self.open.append((len(self.found), self.length, strength, place))
        self.found.append(None)

    def _close(self, place: int) -> None:
        slot, start, strength, opened = self.open.pop()
        if not "".join(self.pieces)[start:].strip():
            raise self._error(opened, "this highlight holds no visible text")
        self.found[slot] = (start, self.length, strength)

    def _strength(self, marker: str, place: int) -> float:
        if marker == "<hl>":
            return 1.0
        match = _STRENGTH.fullmatch(marker)
        if match is None:
            raise self._error(place, 'expected <hl> or <hl strength="NUMBER">')
        raw = next(group for group in match.groups() if group is not None)
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self._error(place, f"strength must be a finite number, found {raw!r}")
        return value

    def _error(self, place: int, reason: str) -> MarkupError:
        line = self.text.count("\n", 0, place) + 1
        start = self.text.rfind("\n", 0, place) + 1
        end = self.text.find("\n", place)
        end = len(self.text) if end < 0 else end
        left, right = max(start, place - 30), min(end, place + 30)
        excerpt = self.text[left:right].replace("\t", " ")
        escape = "\\**" if self.pattern is _STARS else "\\<hl>"
        return MarkupError(
            f"{reason} (line {line}, column {place - start + 1}):\n  {excerpt}\n  {' ' * (place - left)}^\n"
            f"Write {escape} to keep the marker as text."
        )
