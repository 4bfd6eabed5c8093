"""Live bytes of the tensors that a piece of code allocates, counted exactly and free of allocator noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that come into being inside the block, until nothing refers to them.

    Storages of `known` tensors (weights, plan, inputs) and views of them count nothing. What an operator
    allocates and frees within itself is not seen; it is the same for all variants.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata: tensor for tensor in known}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Bytes alive now."""
        self.live = {key: item for key, item in self.live.items() if not item[0].expired()}
        return sum(size for _, size in self.live.values())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self.bytes)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A dead storage keeps its address for as long as the weak reference to it is held.
        if key not in self.known and key not in self.live:
            self.live[key] = (StorageWeakRef(storage), storage.nbytes())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
