"""On a GPU: weights in few bits are expanded to the numbers of the emulation, also in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.model.lower.expanded import expand
from hpcdecode.model.lower.few_bits import ALL_FORMS, FORMS
from hpcdecode.model.lower.packed_weights import pack_few_bits
from hpcdecode.model.run.cuda_graphs import GraphRecorder


@pytest.mark.parametrize("bits", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_numbers_are_those_of_the_emulation(bits, dtype):
    for outputs, inputs in ((70, 512), (4096, 1280), (1, 32)):
        packed = pack_few_bits(bits, [torch.randn(outputs, inputs)])
        about = ALL_FORMS[bits].native.value, 1, outputs, inputs, dtype
        assert torch.equal(expand(packed.cuda(), *about).cpu(), expand(packed, *about))


@torch.inference_mode()
def test_a_graph_expands_what_memory_holds():
    about = ALL_FORMS["int4"].native.value, 1, 64, 128, torch.bfloat16
    first, second = (pack_few_bits("int4", [torch.randn(64, 128)]) for _ in range(2))
    held, made = first.cuda(), torch.empty(64, 128, dtype=torch.bfloat16, device="cuda")
    replay = GraphRecorder(torch.device("cuda", 0)).record(lambda: made.copy_(expand(held, *about)))
    held.copy_(second)
    replay()
    assert torch.equal(made.cpu(), expand(second, *about))
