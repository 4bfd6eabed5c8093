"""Every error the library raises on purpose.

Each class says what was found, what was expected and what to do next, and carries the exit code the
command line ends with. Catch `PrismError` to catch them all.
"""

from __future__ import annotations


class PrismError(Exception):
    """Base of all errors raised by prism-delta."""

    exit_code = 10


class MarkupError(PrismError):
    """Highlight markup is unbalanced, empty or malformed; the message shows the place."""

    exit_code = 11


class PromptError(PrismError):
    """A prompt cannot be used: empty, not text, or without visible characters in a span."""

    exit_code = 12


class SpanError(PromptError):
    """A span lies outside its text, is empty, or has a strength that is not a finite number."""

    exit_code = 13


class ChatTemplateError(PromptError):
    """A highlight could not be followed exactly through the tokenizer's chat template."""

    exit_code = 14


class TokenizerError(PrismError):
    """The tokenizer cannot report character offsets, or loses the text of a highlight."""

    exit_code = 15


class PromptTooLongError(PromptError):
    """A prompt does not fit the length allowed for it."""

    exit_code = 16


class BatchError(PrismError):
    """Tensors of a batch do not fit together, or the batch is empty."""

    exit_code = 17


class UnsupportedModelError(PrismError):
    """Where a model writes its keys or values could not be established."""

    exit_code = 20


class UnknownModelError(PrismError):
    """No model by that name: not an alias, not a folder, not reachable on the Hub."""

    exit_code = 21


class ModelFetchError(PrismError):
    """A packaged model could not be downloaded, verified or converted."""

    exit_code = 22


class UnknownMethodError(PrismError):
    """No method or preset by that name."""

    exit_code = 23


class ParameterError(PrismError):
    """A method parameter is unknown, of the wrong type, or out of range."""

    exit_code = 24


class PairsError(PrismError):
    """A line of contrastive pairs is not usable; the message names the line."""

    exit_code = 30


class CaptureError(PrismError):
    """The capture pass produced nothing usable, or numbers that are not finite."""

    exit_code = 31


class MomentsError(PrismError):
    """Moments cannot be merged or do not hold what was asked of them."""

    exit_code = 32


class ArtifactError(PrismError):
    """A file is not a readable artifact of this library."""

    exit_code = 40


class TruncatedArtifactError(ArtifactError):
    """An artifact file ends too early or is corrupt."""

    exit_code = 41


class PickleArtifactError(ArtifactError):
    """A pickle file was given where a safetensors artifact belongs."""

    exit_code = 42


class NewerArtifactError(ArtifactError):
    """An artifact was written by a newer version of this library."""

    exit_code = 43


class StorageError(PrismError):
    """A file could not be written or read: disk full, no permission, not UTF-8."""

    exit_code = 44


class PlanMismatchError(PrismError):
    """A plan does not fit the model it should steer; both shapes are named."""

    exit_code = 50


class SteeringError(PrismError):
    """An edit that was asked for could not be made exactly, so nothing was skipped silently."""

    exit_code = 51
