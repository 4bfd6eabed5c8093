"""The linear algebra of the method, on plain tensors; it knows neither models nor files.

Everything is per head and in float64. Shapes: a cross-covariance is [head, dim, dim], a score is [head].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from .errors import MomentsError, ParameterError

Energy: TypeAlias = Literal["sigma", "sigma2"]
Score: TypeAlias = Literal["frobenius", "mean_norm"]


@dataclass(frozen=True)
class Subspace:
    """Left singular vectors of a cross-covariance, strongest first, and how many of them are kept.

    vectors [head, dim, dim] (columns are vectors), values [head, dim], rank [head].
    """

    vectors: torch.Tensor
    values: torch.Tensor
    rank: torch.Tensor

    def projection(self) -> torch.Tensor:
        """P = U_k U_k' as [head, dim, dim]."""
        columns = torch.arange(self.vectors.shape[-1]) < self.rank[:, None]
        kept = self.vectors * columns[:, None, :]
        return kept @ kept.transpose(-1, -2)


def leading_subspace(covariance: torch.Tensor, gamma: float, energy: Energy) -> Subspace:
    """The directions that hold a share `gamma` of the energy of each head's [dim, dim] matrix."""
    check_finite(covariance, "a cross-covariance")
    vectors, values, _ = torch.linalg.svd(covariance.double())
    return Subspace(vectors, values, rank_by_energy(values, gamma, energy))


def rank_by_energy(values: torch.Tensor, gamma: float, energy: Energy) -> torch.Tensor:
    """How many leading singular values [head, dim] hold the share `gamma` of the total.

    1 + the number of prefixes whose share is still below gamma, but never more than the numerical rank:
    directions the data do not span carry rounding noise, not signal. A zero matrix has rank 0.
    """
    if not 0 < gamma <= 1:
        raise ParameterError(f"gamma must lie in (0, 1], found {gamma}")
    if energy not in ("sigma", "sigma2"):
        raise ParameterError(f"energy must be 'sigma' or 'sigma2', found {energy!r}")
    amounts = values.double() if energy == "sigma" else values.double() ** 2
    total = amounts.sum(-1, keepdim=True)
    shares = amounts.cumsum(-1) / total.clamp_min(torch.finfo(torch.float64).tiny)
    wanted = 1 + (shares < gamma).sum(-1)
    floor = values[..., :1] * values.shape[-1] * torch.finfo(torch.float64).eps
    return torch.minimum(wanted, (values > floor).sum(-1))


def discriminability(count: int, norm_sum: torch.Tensor, square_sum: torch.Tensor, score: Score) -> torch.Tensor:
    """D [head] from N, the sums of ||h+ - h-|| and of its square.

    mean_norm is the paper's formula; frobenius, ||H+ - H-||_F / N, is what the published code computes
    and what its published shifts and gains were made with.
    """
    if count < 1:
        raise MomentsError("moments of no rows have no discriminability")
    if score == "mean_norm":
        return norm_sum.double() / count
    if score == "frobenius":
        return square_sum.double().sqrt() / count
    raise ParameterError(f"score must be 'frobenius' or 'mean_norm', found {score!r}")


def softplus_weight(score: torch.Tensor, shift: float) -> torch.Tensor:
    """w = log(1 + exp(D - shift))."""
    return torch.nn.functional.softplus(score.double() - shift)


def top_share(scores: torch.Tensor, share: float) -> torch.Tensor:
    """A mask of the heads in the top `share` by score (any shape); ties go to the earlier head, 0 never in."""
    if not 0 < share <= 1:
        raise ParameterError(f"keep must lie in (0, 1], found {share}")
    flat = scores.flatten()
    count = max(1, round(share * flat.numel()))
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[torch.argsort(flat, descending=True, stable=True)[:count]] = True
    return (chosen & (flat > 0)).reshape(scores.shape)


def check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise MomentsError(
            f"{what} holds NaN or infinite numbers; capture again in float32 (float16 overflows in some models)"
        )
