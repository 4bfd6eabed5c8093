"""Files of this library: safetensors with one JSON header, written whole or not at all. Never pickle."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import (
    ArtifactError,
    NewerArtifactError,
    PickleArtifactError,
    StorageError,
    TruncatedArtifactError,
)

_KEY = "prism_delta"


def write_artifact(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    header: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> Path:
    """Write atomically: a reader sees the old file or the whole new one, whatever interrupts this."""
    from safetensors.torch import save

    text = json.dumps({"kind": kind, "version": version, **header}, sort_keys=True, ensure_ascii=False)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {_KEY: text})
    return write_bytes(path, data)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write a file through a temporary neighbour that is removed if anything goes wrong."""
    target = Path(path)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error.strerror or error}; nothing half-written was left. Free some space, or "
            "write elsewhere (PRISM_DELTA_CACHE sets the cache folder)"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return target


def read_artifact(
    path: str | os.PathLike[str], kind: str, version: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a file of this kind, or an ArtifactError that names file and reason."""
    from safetensors import SafetensorError, safe_open

    target = Path(path)
    _check_readable(target, kind)
    try:
        with safe_open(target, framework="pt") as file:
            metadata = file.metadata() or {}
            header = _header(target, metadata, kind, version)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise TruncatedArtifactError(f"{target} is truncated or not a safetensors file ({error})") from error
    return header, tensors


def artifact_kind(path: str | os.PathLike[str]) -> str:
    """What kind of artifact a file says it is."""
    from safetensors import SafetensorError, safe_open

    target = Path(path)
    _check_readable(target, "plan or moments")
    try:
        with safe_open(target, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise TruncatedArtifactError(f"{target} is truncated or not a safetensors file ({error})") from error
    return str(_parse(target, metadata).get("kind", "?"))


def _check_readable(target: Path, kind: str) -> None:
    try:
        with target.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise StorageError(f"cannot read {target}: {error.strerror or error}") from error
    # A safetensors file starts with the length of its header, which may look like a pickle; then comes the header.
    if start[8:] != b"{" and (start[:2] == b"PK" or start[:1] == b"\x80"):
        raise PickleArtifactError(
            f"{target} is a pickle (.pt) file, which can run code when loaded; expected a {kind} file. Projections of "
            "the official release are converted by `prism import FILE.pt`"
        )
    if not start:
        raise TruncatedArtifactError(f"{target} is empty; expected a {kind} file")


def _parse(target: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata[_KEY])
    except (KeyError, ValueError) as error:
        raise ArtifactError(f"{target} is a safetensors file but was not written by prism-delta (no header)") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"{target} has a damaged header")
    return header


def _header(target: Path, metadata: Mapping[str, str], kind: str, version: int) -> dict[str, Any]:
    header = _parse(target, metadata)
    if header.get("kind") != kind:
        raise ArtifactError(f"{target} holds {header.get('kind')!r}, expected {kind!r}")
    found = header.get("version")
    if not isinstance(found, int) or found > version:
        raise NewerArtifactError(
            f"{target} has format version {found}, this prism-delta reads up to {version}; upgrade prism-delta"
        )
    return header


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
