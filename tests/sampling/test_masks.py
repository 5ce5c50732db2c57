"""What masks leave of logits, on CPUs and by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdecode.sampling.masks import keep_allowed, keep_allowed_by_torch

ROWS, MASKED = 9, [0, 2, 3, 4, 7, 8]


def kept(row, allowed):
    """What is left of a row, token by token."""
    row = [value if ok else -np.inf for value, ok in zip(row, allowed, strict=True)]
    if all(value == -np.inf for value in row):
        row = [0.0 if ok else value for value, ok in zip(row, allowed, strict=True)]
    return row


def test_masks_have_all_tokens_of_the_logits():
    with pytest.raises(ValueError, match="expected those of at least 65 tokens, got 64"):
        keep_allowed(torch.zeros(1, 65), [0], np.zeros((1, 2), np.uint32))


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 500])
def test_only_allowed_tokens_are_left_and_equally_likely_if_they_were_forbidden(vocabulary, by_torch):
    draw = np.random.default_rng(vocabulary)
    logits = draw.normal(size=(ROWS, vocabulary)).astype(np.float32)
    allowed = draw.random((len(MASKED), vocabulary)) < 0.3
    allowed[1], allowed[2] = False, True
    logits[3][allowed[2]] = -np.inf  # all that may come was forbidden
    logits[4][: vocabulary // 2] = -np.inf
    logits[7][:] = np.nan
    whole = np.zeros((len(MASKED), 32 * (vocabulary // 32 + 2)), bool)  # a tokenizer's tokens beyond the model's
    whole[:, :vocabulary], whole[:, vocabulary:] = allowed, True
    masks = np.packbits(whole, axis=1, bitorder="little").view(np.uint32)
    expected = logits.copy()
    for place, row in enumerate(MASKED):
        expected[row] = kept(logits[row], allowed[place])
    found = torch.from_numpy(logits.copy())
    if by_torch:
        keep_allowed_by_torch(found, torch.tensor(MASKED), torch.from_numpy(masks.view(np.int32)))
    else:
        keep_allowed(found, MASKED, masks)
    np.testing.assert_array_equal(found.numpy(), expected)
