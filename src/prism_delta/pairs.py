"""Contrastive pairs: two contexts, two questions, two answers a line, each question irrelevant to the other
context. Every line gives two triplets (context and answer; relevant question; irrelevant question)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from .errors import PairsError, StorageError

FIELDS = ("context_1", "question_1", "answer_1", "context_2", "question_2", "answer_2")


@dataclass(frozen=True)
class Triplet:
    """A context, the place of the answer in it, a question it answers and one it does not."""

    context: str
    answer: str
    relevant: str
    irrelevant: str

    def __post_init__(self) -> None:
        for name in ("context", "answer", "relevant", "irrelevant"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise PairsError(f"{name} must be text that is not empty, found {value!r}")
        if not self.answer_place():
            raise PairsError(f"the answer {self.answer!r} is not in its context {self.context!r}")

    def answer_place(self) -> tuple[int, int] | None:
        """[start, end) of the answer's first occurrence in the context, in any case."""
        match = re.search(re.escape(self.answer), self.context, re.IGNORECASE)
        return match.span() if match else None


Pairs: TypeAlias = str | os.PathLike[str] | Iterable[Mapping[str, Any] | Triplet] | None


def shipped_pairs() -> list[dict[str, Any]]:
    """The lines this library comes with."""
    text = resources.files("prism_delta").joinpath("data/pairs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def load_triplets(pairs: Pairs = None) -> list[Triplet]:
    """Triplets of a file (path), of lines or triplets (iterable), or of the shipped file (None)."""
    if pairs is None:
        return _from_lines(enumerate(shipped_pairs(), 1), "the shipped pairs")
    if isinstance(pairs, str | os.PathLike):
        return _from_lines(_read_lines(Path(pairs)), str(pairs))
    items = list(pairs)
    if items and all(isinstance(item, Triplet) for item in items):
        return [item for item in items if isinstance(item, Triplet)]
    return _from_lines(enumerate(items, 1), "the given pairs")


def _read_lines(path: Path) -> Iterable[tuple[int, Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise PairsError(f"{path}, line {number}: not JSON ({error})") from error


def _from_lines(lines: Iterable[tuple[int, Any]], source: str) -> list[Triplet]:
    triplets: list[Triplet] = []
    for number, line in lines:
        try:
            if isinstance(line, Triplet):
                triplets.append(line)
            else:
                triplets += pair_to_triplets(line)
        except PairsError as error:
            raise PairsError(f"{source}, line {number}: {error}") from error
    if not triplets:
        raise PairsError(f"{source}: no pairs found; expected JSON lines with {', '.join(FIELDS)}")
    return triplets


def pair_to_triplets(line: Any) -> list[Triplet]:
    """The two triplets of one line."""
    if not isinstance(line, Mapping):
        raise PairsError(f"expected an object with {', '.join(FIELDS)}, found {type(line).__name__}")
    missing = [name for name in FIELDS if name not in line]
    if missing:
        raise PairsError(f"missing {', '.join(missing)}")
    return [
        Triplet(line["context_1"], line["answer_1"], line["question_1"], line["question_2"]),
        Triplet(line["context_2"], line["answer_2"], line["question_2"], line["question_1"]),
    ]


def check_pair(line: Any) -> list[str]:
    """Everything that makes a line worse than it should be; empty for a good one.

    Stricter than loading: an answer must occur exactly once in its context and in neither question.
    """
    try:
        triplets = pair_to_triplets(line)
    except PairsError as error:
        return [str(error)]
    problems = []
    for number, triplet in enumerate(triplets, 1):
        answer = re.compile(re.escape(triplet.answer), re.IGNORECASE)
        times = len(answer.findall(triplet.context))
        if times != 1:
            problems.append(f"answer_{number} {triplet.answer!r} occurs {times} times in its context")
        for question in (triplet.relevant, triplet.irrelevant):
            if answer.search(question):
                problems.append(f"answer_{number} {triplet.answer!r} occurs in the question {question!r}")
    return problems


def triplets_hash(triplets: Iterable[Triplet]) -> str:
    """A short fingerprint of the data, the same for the same triplets in the same order."""
    digest = hashlib.sha256()
    for item in triplets:
        digest.update(json.dumps([item.context, item.answer, item.relevant, item.irrelevant]).encode())
    return digest.hexdigest()[:16]
