from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moments_for_tests import random_rows
from prism_delta.errors import MomentsError, ParameterError
from prism_delta.subspace import (
    check_finite,
    discriminability,
    leading_subspace,
    rank_by_energy,
    softplus_weight,
    top_share,
)

energies = st.sampled_from(["sigma", "sigma2"])
gammas = st.floats(0.01, 1.0)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """[head, dim, dim], of full rank or less."""
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    inner = draw(st.integers(1, dim))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    left, right = (torch.randn(heads, dim, inner, generator=generator, dtype=torch.float64) for _ in range(2))
    return left @ right.transpose(1, 2)


@pytest.mark.parametrize(
    ("values", "gamma", "energy", "rank"),
    [
        ([4.0, 3.0, 2.0, 1.0], 0.39, "sigma", 1),
        ([4.0, 3.0, 2.0, 1.0], 0.41, "sigma", 2),
        ([4.0, 3.0, 2.0, 1.0], 0.71, "sigma", 3),
        ([4.0, 3.0, 2.0, 1.0], 0.91, "sigma", 4),
        ([4.0, 3.0, 2.0, 1.0], 0.53, "sigma2", 1),
        ([4.0, 3.0, 2.0, 1.0], 0.54, "sigma2", 2),
        ([4.0, 3.0, 2.0, 1.0], 0.97, "sigma2", 4),
        # Reached exactly is reached.
        ([2.0, 1.0, 1.0], 0.5, "sigma", 1),
        ([2.0, 1.0, 1.0], 0.75, "sigma", 2),
        ([1.0, 1.0, 1.0, 1.0], 1.0, "sigma", 4),
        ([1.0, 1.0, 1.0, 1.0], 1.0, "sigma2", 4),
        ([1.0, 1.0, 0.0, 0.0], 1.0, "sigma", 2),
        ([1.0, 1e-16, 1e-17], 1.0, "sigma", 1),
        ([5.0], 0.01, "sigma", 1),
        ([0.0, 0.0, 0.0], 0.5, "sigma", 0),
        ([0.0, 0.0, 0.0], 1.0, "sigma2", 0),
    ],
)
def test_rank_by_energy(values: list[float], gamma: float, energy: Any, rank: int) -> None:
    assert rank_by_energy(torch.tensor([values]), gamma, energy).tolist() == [rank]
    assert rank_by_energy(1e6 * torch.tensor([values, values[:1] * len(values)]), gamma, energy)[0] == rank


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), gammas, energies)
def test_the_rank_is_the_smallest_that_holds_the_share(values: list[float], gamma: float, energy: Any) -> None:
    values = sorted(values, reverse=True)
    amounts = [value if energy == "sigma" else value**2 for value in values]
    rank = int(rank_by_energy(torch.tensor([values], dtype=torch.float64), gamma, energy))
    total = math.fsum(amounts)
    assert 1 <= rank <= len(values)
    assert math.fsum(amounts[:rank]) >= gamma * total * (1 - 1e-12)
    assert rank == 1 or math.fsum(amounts[: rank - 1]) <= gamma * total * (1 + 1e-12)


@pytest.mark.parametrize("gamma", [0.0, -0.1, 1.001, math.nan, math.inf])
def test_gamma_lies_between_zero_and_one(gamma: float) -> None:
    with pytest.raises(ParameterError, match=r"gamma must lie in \(0, 1\], found"):
        rank_by_energy(torch.ones(1, 2), gamma, "sigma")


def test_energy_is_one_of_two() -> None:
    with pytest.raises(ParameterError, match="energy must be 'sigma' or 'sigma2', found 'sigma3'"):
        rank_by_energy(torch.ones(1, 2), 0.5, "sigma3")  # type: ignore[arg-type]


@settings(deadline=None)
@given(matrices(), gammas, energies)
def test_a_projection_is_idempotent_and_symmetric_of_the_rank_it_says(
    matrix: torch.Tensor, gamma: float, energy: Any
) -> None:
    subspace = leading_subspace(matrix, gamma, energy)
    projection = subspace.projection()
    assert projection.dtype == torch.float64
    torch.testing.assert_close(projection @ projection, projection, rtol=0, atol=1e-12)
    torch.testing.assert_close(projection, projection.transpose(1, 2), rtol=0, atol=1e-12)
    trace = projection.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(trace, subspace.rank.double(), rtol=0, atol=1e-12)


@settings(deadline=None)
@given(matrices(), energies)
def test_with_all_the_energy_nothing_of_the_matrix_is_lost(matrix: torch.Tensor, energy: Any) -> None:
    projection = leading_subspace(matrix, 1.0, energy).projection()
    torch.testing.assert_close(projection @ matrix, matrix, rtol=0, atol=1e-7 * float(matrix.abs().max()))


@settings(deadline=None)
@given(matrices(), gammas, energies, st.sampled_from([1e-40, 1e-6, 1e6, 1e40]))
def test_the_scale_of_the_data_does_not_matter(matrix: torch.Tensor, gamma: float, energy: Any, factor: float) -> None:
    # A share that falls on gamma to the last digit may round either way.
    plain = leading_subspace(matrix, gamma, energy)
    scaled = leading_subspace(factor * matrix, gamma, energy)
    near = [leading_subspace(matrix, min(1.0, gamma * (1 + shift)), energy).rank for shift in (-1e-9, 1e-9)]
    if torch.equal(*near):
        assert torch.equal(scaled.rank, plain.rank)


def test_the_leading_direction_is_the_column_space() -> None:
    column, row = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([1.0, 2.0, 2.0])
    subspace = leading_subspace(torch.outer(column, row)[None], 0.9, "sigma")
    expected = torch.outer(column, column).double() / 25
    torch.testing.assert_close(subspace.projection()[0], expected, rtol=0, atol=1e-12)
    assert subspace.values[0, 0] == pytest.approx(15)


def test_heads_do_not_mix() -> None:
    matrix = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([2.0, 1.0, 0.0])), torch.eye(3)])
    subspace = leading_subspace(matrix, 0.9, "sigma")
    assert subspace.rank.tolist() == [0, 2, 3]
    expected = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 1.0, 0.0])), torch.eye(3)]).double()
    torch.testing.assert_close(subspace.projection(), expected, rtol=0, atol=1e-12)


def test_fewer_rows_than_dimensions_span_no_more_than_the_rows() -> None:
    neutral, positive, negative = random_rows(count=3, heads=2, dim=8, layers=[0])[0, "key"]
    matrix = torch.einsum("nhi,nhj->hij", neutral, positive - negative)
    assert leading_subspace(matrix, 1.0, "sigma").rank.tolist() == [3, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    matrix = torch.eye(3)[None].clone()
    matrix[0, 1, 2] = bad
    with pytest.raises(MomentsError, match="a cross-covariance holds NaN or infinite numbers"):
        leading_subspace(matrix, 0.9, "sigma")
    with pytest.raises(MomentsError, match="the thing holds NaN"):
        check_finite(matrix, "the thing")
    check_finite(torch.eye(3), "the thing")


def test_discriminability_is_the_mean_of_norms_or_the_norm_over_n() -> None:
    _, positive, negative = random_rows(count=30, heads=3, layers=[0])[0, "key"]
    norms = (positive - negative).norm(dim=-1)  # [row, head]
    sums = 30, norms.sum(0), norms.square().sum(0)
    torch.testing.assert_close(discriminability(*sums, "mean_norm"), norms.mean(0))
    frobenius = torch.stack([torch.linalg.matrix_norm((positive - negative)[:, head]) / 30 for head in range(3)])
    torch.testing.assert_close(discriminability(*sums, "frobenius"), frobenius)


@pytest.mark.parametrize(
    ("count", "score", "error", "reason"),
    [
        (0, "mean_norm", MomentsError, "no rows have no discriminability"),
        (1, "median", ParameterError, "score must be 'frobenius' or 'mean_norm', found 'median'"),
    ],
)
def test_discriminability_refuses(count: int, score: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        discriminability(count, torch.ones(1), torch.ones(1), score)


@pytest.mark.parametrize(
    ("score", "shift", "weight"),
    [
        (0.08, 0.08, 0.693),
        (0.137, 0.08, 0.722),
        (0.451, 0.08, 0.896),
        (0.0, 0.5, 0.474),
        (100.0, 0.0, 100.0),
        (0.0, 100.0, 0.0),
    ],
)
def test_softplus_weight(score: float, shift: float, weight: float) -> None:
    found = softplus_weight(torch.tensor([score]), shift)
    assert found.dtype == torch.float64
    assert round(found.item(), 3) == weight


@pytest.mark.parametrize(
    ("scores", "share", "chosen"),
    [
        ([1.0, 4.0, 3.0, 2.0], 0.5, [0, 1, 1, 0]),
        ([1.0, 4.0, 3.0, 2.0], 0.25, [0, 1, 0, 0]),
        ([1.0, 4.0, 3.0, 2.0], 1.0, [1, 1, 1, 1]),
        ([1.0, 4.0, 3.0, 2.0], 0.01, [0, 1, 0, 0]),
        ([1.0, 4.0, 3.0, 2.0], 0.7, [0, 1, 1, 1]),
        ([1.0, 1.0, 1.0, 1.0], 0.5, [1, 1, 0, 0]),
        ([1.0, 2.0, 1.0, 1.0], 0.5, [1, 1, 0, 0]),
        ([0.0, 0.0, 5.0, 0.0], 1.0, [0, 0, 1, 0]),
        ([0.0, 0.0], 0.5, [0, 0]),
        ([[1.0, 4.0], [3.0, 2.0]], 0.5, [[0, 1], [1, 0]]),
    ],
)
def test_top_share(scores: Any, share: float, chosen: Any) -> None:
    assert top_share(torch.tensor(scores), share).int().tolist() == chosen


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, math.nan])
def test_top_share_lies_between_zero_and_one(share: float) -> None:
    with pytest.raises(ParameterError, match=r"keep must lie in \(0, 1\], found"):
        top_share(torch.ones(2), share)
