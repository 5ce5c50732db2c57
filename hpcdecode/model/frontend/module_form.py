"""What modules and arguments must have in common to compute the same from their tensors."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SCALARS = (type(None), bool, int, float, str, torch.dtype, torch.device)
TensorForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides


class ModuleForm(NamedTuple):
    """Class and attributes of a module, deeply, without the values of its tensors.

    Attributes:
        class_id: Id of the class.
        tensors: Name and form of every parameter and buffer.
        attributes: Form of all other attributes.
        children: Name and form of every child module.
    """

    class_id: int
    tensors: list[tuple[str, TensorForm | None]]
    attributes: object
    children: list[tuple[str, ModuleForm | None]]


def module_form(module: torch.nn.Module) -> ModuleForm:
    """Return what modules must have in common to compute the same from their tensors."""
    named = (*module._parameters.items(), *module._buffers.items())
    tensors: list[tuple[str, TensorForm | None]] = [
        (name, None if t is None else (tuple(t.shape), t.stride(), t.dtype)) for name, t in named
    ]
    others = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
    children = [(name, None if m is None else module_form(m)) for name, m in module._modules.items()]
    return ModuleForm(id(type(module)), tensors, attribute_form(others), children)


def attribute_form(attribute: Any) -> object:
    """Return `attribute` as plain data where it is that, or a function of such arguments; else its type and id."""
    if isinstance(attribute, _SCALARS):
        return type(attribute), repr(attribute)
    if type(attribute) in (list, tuple):
        return type(attribute), [attribute_form(v) for v in attribute]
    if isinstance(attribute, dict):
        return type(attribute), [(attribute_form(k), attribute_form(v)) for k, v in attribute.items()]
    if type(attribute) in (set, frozenset):
        return type(attribute), sorted(repr(attribute_form(v)) for v in attribute)
    if type(attribute) is functools.partial:
        func, args, keywords = id(attribute.func), attribute_form(attribute.args), attribute_form(attribute.keywords)
        return type(attribute), func, args, keywords
    return type(attribute), id(attribute)


def argument_form(argument: object) -> object:
    """Return what arguments must have in common; of tensors that is shape, strides, dtype, device and type."""
    if isinstance(argument, Tensor):
        form = str(tuple(argument.shape)), str(argument.stride()), argument.dtype, str(argument.device)
        return "tensor", *form, type(argument)
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "symbol", str(argument)
    return attribute_form(argument)
