"""Weights that cannot be those of a trained model: not finite, or quantisation codes without their scales.

A few values of every weight are checked when it is read. That takes microseconds a weight, on pages that are read next
in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.stack import Stack

ROWS, COLUMNS = 4, 64  # of a matrix that are checked
MOST = 8.0  # median absolute value in a matrix: below 1 if trained, about 20 for int8 codes, 50 for FP8 codes
STEP = 0.5  # codes of int8, int4 and FP4 are multiples of it


def check_values(path: Path, weights: Mapping[str, Tensor | Stack]) -> None:
    """Raise UserError for the first of `weights` that cannot be those of a trained model.

    Args:
        path: Model directory.
        weights: Weights by name.
    """
    for name, weight in weights.items():
        for piece in pieces_of(weight):
            if piece.is_floating_point() and (problem := implausible(piece)):
                raise UserError(
                    f"{path}: weight {name!r} cannot be right: {problem}; copy the checkpoint again, "
                    "or, if it was converted from a quantised one, convert it with its scales"
                )


def pieces_of(weight: Tensor | Stack) -> Iterator[Tensor]:
    """Yield the tensors that make up `weight`."""
    if isinstance(weight, Tensor):
        yield weight
    else:
        yield from (piece for pieces in weight for piece in pieces)


def implausible(weight: Tensor) -> str:
    """Return what is wrong with a sample of `weight`, or "". The values of a vector, such as a bias, may be large."""
    sample = sample_of(weight).to(torch.float32)
    rms = float(torch.linalg.vector_norm(sample)) / math.sqrt(max(sample.numel(), 1))
    if not math.isfinite(rms):
        return "it has values that are not finite"
    if weight.ndim < 2:
        return ""
    if rms > STEP and (typical := float(sample.abs().median())) > MOST:
        return f"its values are about {typical:.0f} in size, expected less than {MOST:.0f}"
    if rms > STEP and is_codes(sample):
        return f"its values are multiples of {STEP}, as codes of a quantised weight are"
    return ""


def sample_of(weight: Tensor) -> Tensor:
    """Return a few rows of `weight`, of the first and last of its matrices if it has several; a vector as it is."""
    if weight.ndim < 2:
        return weight
    ends = [slice(None, None, max(size - 1, 1)) for size in weight.shape[:-2]]
    rows = slice(None, None, max(weight.shape[-2] // ROWS, 1))
    index = (*ends, rows, slice(COLUMNS))
    return weight[index]


def is_codes(sample: Tensor) -> bool:
    """Return whether all values of `sample` are multiples of STEP, and one is larger than STEP."""
    scaled = sample / STEP
    return bool((scaled == scaled.round()).all()) and float(sample.abs().max()) > 1
