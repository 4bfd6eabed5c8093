from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_delta.edit import Edit, edit_rows
from prism_delta.errors import PlanMismatchError


def orthonormal(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)).Q


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def edit_of_rank(rank: int, dim: int = 8, heads: int = 2) -> Edit:
    ranks = torch.full((heads,), rank)
    return Edit.from_subspace(orthonormal(heads, dim), ranks, torch.linspace(0.5, 2, heads, dtype=torch.float64))


@st.composite
def subspaces(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, dim = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    ranks = draw(st.lists(st.integers(0, dim), min_size=heads, max_size=heads))
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3, -2.5]), min_size=heads, max_size=heads))
    vectors = orthonormal(heads, dim, draw(st.integers(0, 999)))
    return vectors, torch.tensor(ranks), torch.tensor(weights, dtype=torch.float64)


@settings(deadline=None)
@given(subspaces())
def test_a_subspace_edit_is_the_weighted_projection_for_all_ranks(subspace: Any) -> None:
    vectors, ranks, weights = subspace
    edit = Edit.from_subspace(*subspace)
    assert edit.matrix().dtype == torch.float32
    assert edit.shape == vectors.shape[:2]
    for head, (rank, weight) in enumerate(zip(ranks.tolist(), weights.tolist(), strict=True)):
        kept = vectors[head, :, :rank]
        torch.testing.assert_close(edit.matrix()[head].double(), weight * kept @ kept.T, rtol=0, atol=2e-6)


@settings(deadline=None)
@given(subspaces(), st.integers(0, 5))
def test_the_delta_of_rows_is_rows_times_the_matrix(subspace: Any, count: int) -> None:
    edit = Edit.from_subspace(*subspace)
    rows = normal(count, *edit.shape)
    expected = torch.einsum("nhd,hde->nhe", rows, edit.matrix())
    assert edit.delta(rows).shape == rows.shape
    torch.testing.assert_close(edit.delta(rows), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "weights", "form"),
    [
        ([0, 0], [1, 1], "scalar"),
        ([8, 8], [1, 2], "scalar"),
        ([0, 8], [1, 2], "scalar"),
        ([5, 4], [0, 0], "scalar"),
        ([1, 1], [1, 1], "low-rank"),
        ([3, 0], [1, 1], "low-rank"),
        ([7, 7], [1, 1], "low-rank"),
        ([5, 2], [1, 1], "low-rank"),
        ([4, 1], [1, 1], "dense"),
        ([4, 8], [1, 1], "dense"),
        ([4, 1], [0, 1], "low-rank"),
    ],
)
def test_the_cheapest_form_is_chosen(ranks: list[int], weights: list[float], form: str) -> None:
    edit = Edit.from_subspace(orthonormal(2, 8), torch.tensor(ranks), torch.tensor(weights, dtype=torch.float64))
    assert edit.form == form
    assert edit.nbytes <= 4 * (2 * 8 * 8 + 2)
    assert all(tensor.dtype == torch.float32 for tensor in edit.tensors().values())


def test_a_full_rank_is_exactly_the_identity() -> None:
    matrix = Edit.from_subspace(orthonormal(2, 8), torch.tensor([8, 8]), torch.tensor([0.5, -3.0]).double()).matrix()
    assert torch.equal(matrix, torch.stack([0.5 * torch.eye(8), -3 * torch.eye(8)]))


@pytest.mark.parametrize(
    ("matrix", "form"),
    [
        (torch.zeros(2, 3, 3), "scalar"),
        (torch.stack([torch.eye(3), -2 * torch.eye(3)]), "scalar"),
        (torch.eye(3).expand(2, 3, 3), "scalar"),
        (torch.diag(torch.tensor([1.0, 1.0, 2.0])).expand(2, 3, 3), "dense"),
        (normal(2, 3, 3), "dense"),
        (normal(2, 3, 3).double(), "dense"),
        (normal(2, 3, 3).half(), "dense"),
        (normal(2, 3, 3).requires_grad_(), "dense"),
        (normal(1, 1, 1), "scalar"),
    ],
)
def test_from_matrix_keeps_the_matrix(matrix: torch.Tensor, form: str) -> None:
    edit = Edit.from_matrix(matrix)
    assert torch.equal(edit.matrix(), matrix.detach().float())
    assert (edit.form, edit.shape) == (form, tuple(matrix.shape[:2]))
    rows = normal(4, *edit.shape)
    torch.testing.assert_close(edit.delta(rows), torch.einsum("nhd,hde->nhe", rows, edit.matrix()))


def test_from_matrix_does_not_follow_later_changes() -> None:
    matrix, identity = normal(2, 3, 3), torch.eye(3).repeat(2, 1, 1)
    edits = Edit.from_matrix(matrix), Edit.from_matrix(identity)
    before = [edit.matrix().clone() for edit in edits]
    matrix.zero_()
    identity.zero_()
    assert [torch.equal(edit.matrix(), old) for edit, old in zip(edits, before, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (torch.eye(3), r"an edit matrix is \[head, dim, dim\], found \[3, 3\]"),
        (torch.ones(2, 3, 4), r"found \[2, 3, 4\]"),
        (torch.ones(1, 2, 3, 3), r"found \[1, 2, 3, 3\]"),
        (torch.full((1, 2, 2), math.nan), "holds NaN or infinite numbers"),
        (torch.full((1, 2, 2), math.inf), "holds NaN or infinite numbers"),
        (torch.full((1, 2, 2), 1e39, dtype=torch.float64), "holds NaN or infinite numbers"),
    ],
)
def test_from_matrix_refuses(matrix: torch.Tensor, reason: str) -> None:
    with pytest.raises(PlanMismatchError, match=reason):
        Edit.from_matrix(matrix)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Edit.from_matrix(torch.zeros(2, 3, 3)), True),
        (edit_of_rank(0), True),
        (Edit.from_subspace(orthonormal(1, 4), torch.tensor([2]), torch.zeros(1).double()), True),
        (edit_of_rank(1), False),
        (edit_of_rank(4), False),
        (edit_of_rank(7), False),
        (Edit.from_matrix(1e-30 * torch.eye(3)[None]), False),
    ],
)
def test_is_zero(edit: Edit, expected: bool) -> None:
    assert edit.is_zero is expected


@pytest.mark.parametrize("rank", [0, 1, 4, 7, 8])
def test_another_dtype_changes_numbers_only(rank: int) -> None:
    edit = edit_of_rank(rank)
    moved = edit.to(torch.device("cpu"), torch.float64)
    assert {tensor.dtype for tensor in moved.tensors().values()} == {torch.float64}
    assert (moved.form, moved.shape, moved.nbytes) == (edit.form, edit.shape, 2 * edit.nbytes)
    torch.testing.assert_close(moved.matrix(), edit.matrix().double(), rtol=0, atol=1e-6)


ROWS = torch.tensor([0, 0, 1]), torch.tensor([1, 3, 0])
STRENGTHS = torch.tensor([1.0, -0.5, 2.0])


@pytest.mark.parametrize("rank", range(9))
def test_edit_rows_changes_the_rows_and_nothing_else(rank: int) -> None:
    edit = edit_of_rank(rank)
    before = normal(2, 4, 2, 8)
    after = before.clone()
    edit_rows(after, ROWS, STRENGTHS, edit)
    expected = before.clone()
    for sample, token, strength in zip(*ROWS, STRENGTHS, strict=True):
        row = before[sample, token]
        expected[sample, token] = row + strength * torch.einsum("hd,hde->he", row, edit.matrix())
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    untouched = torch.ones(2, 4, dtype=torch.bool)
    untouched[ROWS] = False
    assert torch.equal(after[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gain", [0.5, 1.0, -1.0, 0.1])
def test_a_scaling_is_rounded_once(dtype: torch.dtype, gain: float) -> None:
    before = normal(2, 4, 2, 8).to(dtype)
    after = before.clone()
    edit_rows(after, ROWS, torch.ones(3), Edit.from_matrix(gain * torch.eye(8).repeat(2, 1, 1)))
    exact = before[ROWS].float()
    assert torch.equal(after[ROWS], (exact + exact * gain).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 4, 7, 8])
def test_half_precision_is_edited_in_the_precision_of_the_edit(dtype: torch.dtype, rank: int) -> None:
    edit = edit_of_rank(rank)
    before = normal(2, 4, 2, 8).to(dtype)
    after, exact = before.clone(), before.float()
    edit_rows(after, ROWS, STRENGTHS, edit)
    edit_rows(exact, ROWS, STRENGTHS, edit)
    assert torch.equal(after, exact.to(dtype))


def test_edit_rows_writes_through_a_view() -> None:
    # Head-major storage, seen as [batch, token, head, dim].
    storage = normal(2, 2, 4, 8)
    expected = storage.clone()
    expected[0, :, 1] *= 3
    edit_rows(storage.transpose(1, 2), (torch.tensor([0]), torch.tensor([1])), torch.ones(1), doubling())
    assert torch.equal(storage, expected)


def doubling() -> Edit:
    return Edit.from_matrix(2 * torch.eye(8).repeat(2, 1, 1))


def test_no_rows_are_no_change() -> None:
    before = normal(1, 2, 2, 8)
    after = before.clone()
    empty = torch.empty(0, dtype=torch.long)
    edit_rows(after, (empty, empty), torch.empty(0), doubling())
    assert torch.equal(after, before)
