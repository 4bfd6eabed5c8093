from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moments_for_tests import moments_of, random_rows
from prism_delta.artifact import write_artifact
from prism_delta.errors import ArtifactError, MomentsError
from prism_delta.moments import HeadMoments, Moments

HEADER = {
    "model": {"name": "tiny", "revision": "", "weights": "abc"},
    "tokenizer": "123",
    "pairs": "p1",
    "options": {"template": "base"},
    "triplets": 4,
    "skipped": 1,
}


def same(left: Moments, right: Moments) -> bool:
    return (
        left.count == right.count
        and left.header == right.header
        and list(left) == list(right)
        and all(
            torch.equal(tensor, right[place].tensors()[name])
            for place in left
            for name, tensor in left[place].tensors().items()
        )
    )


def test_the_sums_are_those_of_the_formulas() -> None:
    rows = random_rows(count=20, heads=3, dim=5)
    moments = moments_of(rows)
    assert moments.count == 20
    for place, (neutral, positive, negative) in rows.items():
        found = moments[place]
        for head in range(3):
            h, plus, minus = neutral[:, head], positive[:, head], negative[:, head]
            norms = (plus - minus).norm(dim=1)
            expected = [h.T @ h, h.T @ plus, h.T @ minus, norms.sum(), norms.square().sum(), (plus - h).square().sum()]
            for tensor, value in zip(found.tensors().values(), expected, strict=True):
                torch.testing.assert_close(tensor[head], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_sums_are_kept_in_float64(dtype: torch.dtype) -> None:
    item = HeadMoments.zeros(2, 3)
    item.add_rows(*(torch.full((4, 2, 3), 300.0, dtype=dtype) for _ in range(3)))
    assert {tensor.dtype for tensor in item.tensors().values()} == {torch.float64}
    # 4 * 300 * 300: beyond float16.
    assert torch.equal(item.neutral, torch.full((2, 3, 3), 360_000.0, dtype=torch.float64))


def test_equal_conditions_leave_no_contrast() -> None:
    (neutral, positive, _) = random_rows(layers=[0])[0, "key"]
    item = HeadMoments.zeros(2, 6)
    item.add_rows(neutral, positive, positive)
    assert torch.equal(item.positive, item.negative)
    assert not item.contrast_norm.any()
    assert not item.contrast_square.any()
    assert item.neutral_square.all()


def test_shapes_and_layers() -> None:
    rows = random_rows(layers=[7, 2], heads=2, dim=6) | random_rows(layers=[4], channels=["value"], heads=1, dim=3)
    moments = moments_of(rows)
    assert moments.layers("key") == [2, 7]
    assert moments.layers("value") == [2, 4, 7]
    assert moments.shape("key") == {2: (2, 6), 7: (2, 6)}
    assert moments.shape("value") == {2: (2, 6), 4: (1, 3), 7: (2, 6)}


@pytest.mark.parametrize(
    ("count", "heads", "reason"),
    [
        (0, {(0, "key"): HeadMoments.zeros(1, 2)}, "at least one row, found 0"),
        (3, {}, "moments without any layer"),
    ],
)
def test_empty_moments_are_refused(count: int, heads: Any, reason: str) -> None:
    with pytest.raises(MomentsError, match=reason):
        Moments(count, heads)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 99))
def test_merged_shards_equal_one_pass(counts: list[int], seed: int) -> None:
    rows = random_rows(count=sum(counts), dim=3, layers=[0, 1], seed=seed)
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    shards = [
        moments_of({place: tuple(part[end - count : end] for part in triple) for place, triple in rows.items()})  # type: ignore[misc]
        for count, end in zip(counts, ends, strict=True)
    ]
    merged, whole = shards[0].merge(*shards[1:]), moments_of(rows)
    assert merged.count == whole.count
    for place in whole:
        for name, tensor in whole[place].tensors().items():
            torch.testing.assert_close(merged[place].tensors()[name], tensor, rtol=1e-12, atol=1e-12)


def test_merging_changes_neither_side() -> None:
    left, right = moments_of(random_rows(seed=1)), moments_of(random_rows(seed=2))
    left.merge(right)
    assert same(left, moments_of(random_rows(seed=1)))
    assert same(right, moments_of(random_rows(seed=2)))


def test_merging_nothing_is_the_identity() -> None:
    moments = moments_of(random_rows(), HEADER)
    assert same(moments.merge(), moments)


def test_a_merge_says_what_went_into_it() -> None:
    parts = [moments_of(random_rows(seed=number), {**HEADER, "pairs": f"p{number}"}) for number in range(3)]
    merged = parts[0].merge(*parts[1:])
    assert merged.header == {**HEADER, "pairs": "p0+p1+p2", "triplets": 12, "skipped": 3}


@pytest.mark.parametrize(
    ("rows", "header", "reason"),
    [
        ({"layers": [0, 1]}, {}, r"different models: key \(heads, dim\) by layer is .*\(2, 6\)"),
        ({"heads": 3}, {}, r"different models: .* and \{0: \(3, 6\)"),
        ({"dim": 5}, {}, "different models"),
        ({"channels": ["key"]}, {}, "different models: value"),
        ({}, {"model": {"name": "other"}}, "with different model: .*tiny.* and .*other"),
        ({}, {"tokenizer": "456"}, "with different tokenizer: '123' and '456'"),
        ({}, {"options": {"template": "chat"}}, "with different options: .*base.* and .*chat"),
    ],
)
def test_what_does_not_belong_together_is_not_merged(rows: dict[str, Any], header: dict[str, Any], reason: str) -> None:
    left, right = moments_of(random_rows(), HEADER), moments_of(random_rows(**rows), {**HEADER, **header})
    with pytest.raises(MomentsError, match=reason):
        left.merge(right)


@pytest.mark.parametrize(
    "moments",
    [
        moments_of(random_rows(), HEADER),
        moments_of(random_rows(layers=[11, 2, 30])),
        moments_of(random_rows(layers=[5], channels=["value"], heads=1, dim=1, count=1), {"name": "Δ"}),
    ],
    ids=["both channels", "layers out of order", "one value head"],
)
def test_saved_and_loaded_is_the_same(moments: Moments, tmp_path: Path) -> None:
    path = moments.save(tmp_path / "x.moments.safetensors")
    loaded = Moments.load(path)
    assert same(loaded, Moments(moments.count, dict(sorted(moments.heads.items())), moments.header))
    assert loaded.save(tmp_path / "y").read_bytes() == path.read_bytes()


def test_moments_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    for field in dataclasses.fields(HeadMoments):
        moments = moments_of(random_rows())
        getattr(moments[1, "value"], field.name).view(-1)[0] = math.nan
        with pytest.raises(MomentsError, match="the value moments of layer 1 holds NaN or infinite numbers"):
            moments.check_finite()
        moments.save(tmp_path / "x")
        with pytest.raises(MomentsError, match="holds NaN"):
            Moments.load(tmp_path / "x")


GOOD_HEADER = {"count": 40, "source": {}}
GOOD_TENSORS = {f"0.key.{name}": tensor for name, tensor in HeadMoments.zeros(1, 2).tensors().items()}


@pytest.mark.parametrize(
    ("header", "tensors", "missing"),
    [
        ({"source": {}}, GOOD_TENSORS, "count"),
        ({"count": 40}, GOOD_TENSORS, "source"),
        ({"count": None, "source": {}}, GOOD_TENSORS, "NoneType"),
        (GOOD_HEADER, {name: item for name, item in GOOD_TENSORS.items() if "square" not in name}, "contrast_square"),
        (GOOD_HEADER, {**GOOD_TENSORS, "1.query.neutral": torch.ones(1)}, "ValueError"),
        (GOOD_HEADER, {**GOOD_TENSORS, "one.key.neutral": torch.ones(1)}, "KeyError"),
        (GOOD_HEADER, {**GOOD_TENSORS, "stray": torch.ones(1)}, "ValueError"),
    ],
)
def test_an_incomplete_file_is_refused(
    header: dict[str, Any], tensors: dict[str, torch.Tensor], missing: str, tmp_path: Path
) -> None:
    path = write_artifact(tmp_path / "x", "moments", 1, header, tensors)
    with pytest.raises(ArtifactError, match=f"is not a complete moments file: .*{missing}"):
        Moments.load(path)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "x", "plan", 1, GOOD_HEADER, GOOD_TENSORS)
    with pytest.raises(ArtifactError, match="holds 'plan', expected 'moments'"):
        Moments.load(path)


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    moments = moments_of(random_rows(layers=[0]), HEADER)
    tensors = load_file(moments.save(tmp_path / "x"))
    assert set(tensors) == {
        f"0.{kind}.{name}" for kind in ("key", "value") for name in HeadMoments.zeros(1, 1).tensors()
    }
    save_file(tensors, tmp_path / "y")
    with pytest.raises(ArtifactError, match="was not written by prism-delta"):
        Moments.load(tmp_path / "y")
