"""GB/s of expanding weights in few bits to bfloat16, by the bytes read and written, against copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hpcdecode.bench.gpu.measure import against_copies
from hpcdecode.bench.output import Case
from hpcdecode.model.lower.expanded import expand
from hpcdecode.model.lower.few_bits import FORMS
from hpcdecode.model.lower.packed_weights import pack_few_bits

LARGE = 14336, 4096  # outputs and inputs, of Llama 3 8B


def expanding(device: torch.device, size: Sequence[int], passes: int) -> Iterator[Case]:
    """Yield GB/s for each form.

    Args:
        device: A GPU, or the CPU, which emulates the kernels.
        size: Outputs and inputs of the weight.
        passes: Number of measurements.

    Raises:
        RuntimeError: If the numbers are not those that the emulated kernels expand.
    """
    outputs, inputs = size
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    for bits, form in FORMS.items():
        packed = pack_few_bits(bits, [weight])
        about = form.native.value, 1, outputs, inputs, torch.bfloat16
        own = packed.to(device)
        made = expand(own, *about)
        if not torch.equal(made.cpu(), expand(packed, *about)):
            raise RuntimeError(f"{bits}: the device expands other numbers than its emulation does")
        yield _case(bits, partial(expand, own, *about), packed.nbytes + made.nbytes, device, passes)


def _case(bits: str, work: partial[Tensor], nbytes: int, device: torch.device, passes: int) -> Case:
    moved = 0

    def step() -> None:
        nonlocal moved
        work()
        moved += nbytes

    return against_copies(f"expanding {bits} weights to bfloat16", step, lambda: moved, device, passes)
