"""What a device is told to do, watched on tensors of the meta device, which has no numbers to read back."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

COPIES = {"to", "copy_"}
VIEWS = {"__getitem__", "view", "unflatten", "flatten", "transpose", "t", "split", "unbind"}
OTHERS = {"as_tensor", "dim", "__len__"}  # that a device does not hear of


class Told(TorchFunctionMode):
    """Counts calls of torch that a device hears of, and copies from the host.

    Other operators of tensors of two devices are refused. What reads a tensor of the device back raises an error.
    """

    def __init__(self):
        super().__init__()
        self.operators, self.copies = 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors}
        name = getattr(func, "__name__", "")
        self.operators += "meta" in devices and name not in VIEWS | OTHERS and not name.startswith("__get__")
        if len(devices) > 1:
            assert name in COPIES, f"{func}: tensors of two devices"
            self.copies += 1
        return out
