"""Operators of torch for devices: with fake tensors of their own, so that torch.compile takes each as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("hpcdecode", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator of torch, and return it.

    Args:
        schema: Its name, arguments and results.
        run: What computes its results, on any device.
        fake: What returns empty tensors like its results.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hpcdecode::{name}", fake, lib=_library)
    made: Callable[..., Any] = getattr(torch.ops.hpcdecode, name).default
    return made
