"""The one kernel: the linear edit of a channel, in the cheapest of its exact forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import PlanMismatchError


@dataclass(frozen=True)
class Edit:
    """M for every head of one channel, as `scale * I + left @ right`, or dense where that is cheaper.

    scale [head]; left [head, dim, rank] and right [head, rank, dim]; dense [head, dim, dim].
    A projection of high rank is `I` minus one of low rank, so it is cheap too. All in float32.
    """

    scale: torch.Tensor
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    dim: int = 0

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor) -> Edit:
        """Any [head, dim, dim]."""
        if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2]:
            raise PlanMismatchError(f"an edit matrix is [head, dim, dim], found {list(matrix.shape)}")
        matrix = matrix.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(matrix).all()):
            raise PlanMismatchError("an edit matrix holds NaN or infinite numbers")
        dim = matrix.shape[1]
        diagonal = matrix[:, 0, 0]
        if torch.equal(matrix, diagonal[:, None, None] * torch.eye(dim)):
            return cls(diagonal.clone(), dim=dim)
        return cls(torch.zeros(matrix.shape[0]), dense=matrix.clone(), dim=dim)

    @classmethod
    def from_subspace(cls, vectors: torch.Tensor, rank: torch.Tensor, weight: torch.Tensor) -> Edit:
        """weight * U_k U_k' per head, from orthonormal columns [head, dim, dim], k [head] and weight [head]."""
        heads, dim, _ = vectors.shape
        rank = torch.where(weight == 0, 0, rank)
        complement = rank > dim - rank
        width = int(torch.where(complement, dim - rank, rank).max())
        scale = torch.where(complement, weight, 0.0)
        if width == 0:
            return cls(scale.float(), dim=dim)
        if 2 * width >= dim:
            kept = vectors * (torch.arange(dim) < rank[:, None])[:, None, :]
            matrix = weight[:, None, None] * (kept @ kept.transpose(1, 2))
            return cls(torch.zeros(heads), dense=matrix.float(), dim=dim)
        basis = torch.zeros(heads, dim, width, dtype=vectors.dtype)
        sign = torch.where(complement, -weight, weight)
        for head in range(heads):
            first, last = (int(rank[head]), dim) if complement[head] else (0, int(rank[head]))
            basis[head, :, : last - first] = vectors[head, :, first:last]
        right = basis.transpose(1, 2).contiguous()
        return cls(scale.float(), (sign[:, None, None] * basis).float(), right.float(), dim=dim)

    @property
    def heads(self) -> int:
        return int(self.scale.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(heads, dim)."""
        return self.heads, self.dim

    @property
    def is_zero(self) -> bool:
        return not any(bool(tensor.any()) for name, tensor in self.tensors().items() if name != "right")

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    @property
    def form(self) -> str:
        """ "scalar", "low-rank" or "dense"."""
        return "dense" if self.dense is not None else "scalar" if self.left is None else "low-rank"

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"scale": self.scale, "left": self.left, "right": self.right, "dense": self.dense}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device, dtype: torch.dtype) -> Edit:
        moved = {name: tensor.to(device, dtype) for name, tensor in self.tensors().items()}
        return Edit(dim=self.dim, **moved)

    def matrix(self) -> torch.Tensor:
        """M as [head, dim, dim]."""
        matrix = self.scale[:, None, None] * torch.eye(self.dim)
        if self.dense is not None:
            matrix = matrix + self.dense
        if self.left is not None and self.right is not None:
            matrix = matrix + self.left @ self.right
        return matrix

    def delta(self, rows: torch.Tensor) -> torch.Tensor:
        """x @ M for rows [row, head, dim]."""
        by_head = rows.transpose(0, 1)
        if self.dense is not None:
            return torch.bmm(by_head, self.dense).transpose(0, 1)
        delta = rows * self.scale[:, None]
        if self.left is not None and self.right is not None:
            delta = delta + torch.bmm(torch.bmm(by_head, self.left), self.right).transpose(0, 1)
        return delta


def edit_rows(view: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], strengths: torch.Tensor, edit: Edit) -> None:
    """x' = x + s * (x @ M), in place, for the rows (sample, token) of a [batch, token, head, dim] view.

    Rows are computed in the precision of `edit` and rounded once, so half-precision models lose nothing
    on the way. No other token is read or written.
    """
    found = view[rows]
    exact = found.to(edit.scale.dtype)
    view[rows] = (exact + strengths[:, None, None] * edit.delta(exact)).to(found.dtype)
