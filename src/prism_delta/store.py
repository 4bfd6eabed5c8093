"""Moments in the cache, so that a model is captured once."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from .cache import cache_dir
from .capturing import CAPTURE_VERSION, capture
from .errors import ArtifactError, MomentsError
from .examples import CaptureOptions
from .fingerprint import model_identity, tokenizer_hash
from .moments import VERSION, Moments
from .pairs import Pairs, load_triplets, triplets_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def cached_moments(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Pairs = None,
    *,
    options: CaptureOptions | None = None,
    progress: bool = False,
) -> Moments:
    """The moments of this model, tokenizer, data and options: from the cache, or captured and kept there."""
    options = options or CaptureOptions()
    triplets = load_triplets(pairs)
    path = moments_path(model, tokenizer, triplets_hash(triplets), options)
    if path.is_file():
        try:
            return Moments.load(path)
        except (ArtifactError, MomentsError) as error:
            log.warning("capturing again: %s", error)
    moments = capture(model, tokenizer, triplets, options=options, progress=progress)
    moments.save(path)
    return moments


def moments_path(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: str, options: CaptureOptions) -> Path:
    """Where the cache keeps them; any difference in what they depend on gives another file."""
    identity = model_identity(model)
    dtype = str(getattr(model, "dtype", ""))
    known = [identity["weights"], tokenizer_hash(tokenizer), data, options.describe(), dtype, VERSION, CAPTURE_VERSION]
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    safe = "".join(c if c.isalnum() or c in "-._" else "-" for c in identity["name"])
    return cache_dir() / "moments" / f"{safe}-{key}.moments.safetensors"
