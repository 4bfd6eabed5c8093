from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism_delta.errors import PairsError, StorageError
from prism_delta.pairs import FIELDS, Triplet, check_pair, load_triplets, pair_to_triplets, shipped_pairs, triplets_hash

GOOD: dict[str, Any] = {
    "context_1": "Anna Pellow keeps bees in Truro.",
    "question_1": "Who keeps bees?",
    "answer_1": "anna pellow",
    "context_2": "The tram stops at Quay Street.",
    "question_2": "Where does the tram stop?",
    "answer_2": "Quay Street",
}
TRIPLETS = [
    Triplet("Anna Pellow keeps bees in Truro.", "anna pellow", "Who keeps bees?", "Where does the tram stop?"),
    Triplet("The tram stops at Quay Street.", "Quay Street", "Where does the tram stop?", "Who keeps bees?"),
]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def test_a_line_gives_two_triplets() -> None:
    assert pair_to_triplets(GOOD) == TRIPLETS
    assert pair_to_triplets({**GOOD, "id": 7, "domain": "x"}) == TRIPLETS
    assert check_pair(GOOD) == []


BAD_LINES = [
    ([], f"expected an object with {', '.join(FIELDS)}, found list"),
    ("text", f"expected an object with {', '.join(FIELDS)}, found str"),
    (None, f"expected an object with {', '.join(FIELDS)}, found NoneType"),
    ({}, f"missing {', '.join(FIELDS)}"),
    *((without(name), f"missing {name}") for name in FIELDS),
    ({**GOOD, "context_1": ""}, "context must be text that is not empty, found ''"),
    ({**GOOD, "answer_2": " \n"}, "answer must be text that is not empty, found ' \\n'"),
    ({**GOOD, "question_1": 3}, "relevant must be text that is not empty, found 3"),
    ({**GOOD, "question_2": None}, "irrelevant must be text that is not empty, found None"),
    ({**GOOD, "answer_1": "Bob"}, "the answer 'Bob' is not in its context 'Anna Pellow keeps bees in Truro.'"),
    ({**GOOD, "answer_2": "Q.ay"}, "the answer 'Q.ay' is not in its context 'The tram stops at Quay Street.'"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_refused_with_its_number(line: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(line)}\n", encoding="utf-8")
    with pytest.raises(PairsError) as from_file:
        load_triplets(path)
    assert str(from_file.value) == f"{path}, line 3: {reason}"
    with pytest.raises(PairsError) as from_list:
        load_triplets([GOOD, line])
    assert str(from_list.value) == f"the given pairs, line 2: {reason}"
    assert check_pair(line) == [reason]


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            {"context_1": "Anna Pellow is ANNA PELLOW."},
            ["answer_1 'anna pellow' occurs 2 times in its context"],
        ),
        (
            {"question_1": "Does Anna Pellow keep bees?"},
            ["answer_1 'anna pellow' occurs in the question 'Does Anna Pellow keep bees?'"],
        ),
        (
            {"answer_2": "tram"},
            ["answer_2 'tram' occurs in the question 'Where does the tram stop?'"],
        ),
        (
            {"answer_1": "bees", "context_2": "Quay Street, Quay Street"},
            [
                "answer_1 'bees' occurs in the question 'Who keeps bees?'",
                "answer_2 'Quay Street' occurs 2 times in its context",
            ],
        ),
    ],
)
def test_check_is_stricter_than_loading(changes: dict[str, str], problems: list[str]) -> None:
    assert check_pair({**GOOD, **changes}) == problems
    assert len(pair_to_triplets({**GOOD, **changes})) == 2


def test_the_shipped_pairs_are_good_and_differ() -> None:
    lines = shipped_pairs()
    assert len(lines) >= 120
    assert {number: check_pair(line) for number, line in enumerate(lines, 1) if check_pair(line)} == {}
    assert [line["id"] for line in lines] == list(range(1, len(lines) + 1))
    for kind in ("context", "question"):
        texts = [line[f"{kind}_{side}"].casefold() for line in lines for side in (1, 2)]
        assert len(set(texts)) == len(texts)


def test_the_shipped_pairs_are_the_default() -> None:
    triplets = load_triplets()
    assert len(triplets) == 2 * len(shipped_pairs())
    assert triplets[:2] == pair_to_triplets(shipped_pairs()[0])
    assert triplets == load_triplets(None) == load_triplets(shipped_pairs())


LINE = json.dumps({**GOOD, "context_1": "Anna Pellow kept bees in \u2028 Zürich."}, ensure_ascii=False)


@pytest.mark.parametrize(
    "data",
    [
        LINE.encode(),
        f"{LINE}\n".encode(),
        f"\n  \n{LINE}\n\n".encode(),
        f"{LINE}\r\n".encode(),
        b"\xef\xbb\xbf" + LINE.encode(),
        json.dumps(json.loads(LINE)).encode(),
    ],
    ids=["bare", "newline", "blank lines", "crlf", "byte order mark", "ascii"],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_reads_files(data: bytes, kind: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(data)
    assert load_triplets(kind(path)) == pair_to_triplets(json.loads(LINE))


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        (b"", PairsError, "no pairs found; expected JSON lines with context_1"),
        (b" \n\n", PairsError, "no pairs found"),
        (LINE.encode() + b"\n{oops\n", PairsError, "line 2: not JSON"),
        (b"\n" + LINE.encode()[:-5], PairsError, "line 2: not JSON"),
        (LINE.encode("latin-1", "replace"), StorageError, r"is not UTF-8 text \(byte \d+\)"),
        (LINE.encode("utf-16"), StorageError, "is not UTF-8 text"),
    ],
)
def test_refuses_files(data: bytes, error: type[Exception], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(data)
    with pytest.raises(error, match=reason) as caught:
        load_triplets(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("nothing.jsonl", "No such file"), (".", "Is a directory")])
def test_refuses_what_is_no_file(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=reason):
        load_triplets(tmp_path / name)


@pytest.mark.parametrize(
    "pairs",
    [TRIPLETS, iter(TRIPLETS), [GOOD], (line for line in [GOOD])],
    ids=["triplets", "iterator of triplets", "lines", "iterator of lines"],
)
def test_takes_any_iterable(pairs: Any) -> None:
    assert load_triplets(pairs) == TRIPLETS


def test_lines_and_triplets_may_be_mixed() -> None:
    assert load_triplets([TRIPLETS[1], GOOD]) == [TRIPLETS[1], *TRIPLETS]


def test_no_pairs_are_refused() -> None:
    with pytest.raises(PairsError, match="the given pairs: no pairs found"):
        load_triplets([])


@pytest.mark.parametrize(
    ("context", "answer", "place"),
    [
        ("Anna and anna", "anna", (0, 4)),
        ("see A.B (x) now", "a.b (X)", (4, 11)),
        ("Zürich", "ZÜRICH", (0, 6)),
    ],
)
def test_the_answer_is_found_in_any_case(context: str, answer: str, place: tuple[int, int]) -> None:
    assert Triplet(context, answer, "q", "r").answer_place() == place


def test_the_hash_depends_on_every_text_and_on_the_order() -> None:
    first, second = TRIPLETS
    variants = [
        [first, second],
        [second, first],
        [first],
        [replace(first, context="Anna Pellow keeps bees in Truro!"), second],
        [replace(first, answer="Anna Pellow"), second],
        [replace(first, relevant="?"), second],
        [replace(first, irrelevant="?"), second],
    ]
    hashes = [triplets_hash(triplets) for triplets in variants]
    assert len(set(hashes)) == len(variants)
    assert hashes[0] == triplets_hash(iter(load_triplets([GOOD])))
    assert all(len(item) == 16 for item in hashes)
