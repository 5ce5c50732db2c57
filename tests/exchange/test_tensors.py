"""Tensors as messages."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.exchange.tensors import bytes_of


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_the_bytes_of_a_column_are_those_of_its_copy(rows):
    """A column of one row is contiguous, whatever its stride."""
    column = torch.arange(6).view(2, 3)[:rows, 1].contiguous()
    assert bytes_of(column).tobytes() == column.numpy().tobytes()
    assert bytes_of(column).size == 8 * rows
