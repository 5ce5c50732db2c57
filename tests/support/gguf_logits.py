"""Logits of small models and what their packed weights hold, to compare GGUF files with checkpoints."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from hpcdecode._ops_cpu import Chain, Product
from hpcdecode.model import load_split
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.few_bits import ALL_FORMS
from hpcdecode.model.lower.instruction import TYPES
from tests.support.steps import Attention, step

IDS = [5, 77, 300, 12, 9, 450, 33, 2]


def logits(path, **options):
    model = load_split(path, dtype="float32", **options)
    return step(model, Attention(model), [(0, i, token) for i, token in enumerate(IDS)], list(range(len(IDS))))


def projections(model):
    """The weights that the slices of a model on the CPU have bound."""
    stretches = [s for i in range(len(model.attends) + 1) for s in model._slices[i].stretches]
    return [weight for s in stretches for weight in s.weights if isinstance(weight, torch.Tensor)]


@torch.no_grad()
def theirs(model):
    return model.eval()(torch.tensor([IDS])).logits[0]


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def expected(source):
    return theirs(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))


def multiply(x, packed, outputs, bits):
    y = torch.empty(len(x), outputs, dtype=x.dtype)
    kind, form = TYPES[x.dtype], packed_weights.form_of(bits)
    work = Product(kind, kind, x.shape[1] * x.element_size() // 4, outputs, packed_weights.isa(), None, *form)
    strides = [x.stride(0) * x.element_size(), 0, y.stride(0) * y.element_size()]
    Chain([(work, [0, 1, 2])], 3, []).run(len(x), 2, [t.data_ptr() for t in (x, packed, y)], strides)
    return y


def expanded(model):
    """Sums of what each packed weight of a model makes of rows of the identity, by its number of outputs."""
    found = []
    for stretch in (t for s in model._slices.values() for t in s.stretches):
        for recipe, weight in zip(stretch.compiled.recipes, stretch.weights, strict=True):
            if recipe.packed is None:
                continue
            bits, size = recipe.bits, recipe.packed
            sizes = (n for n in (32, 64, 96, 128) if ALL_FORMS[bits].words(n) == size.words) if bits else (size.words,)
            inputs = next(iter(sizes))
            for own in weight.unflatten(0, (size.experts, -1)):
                made = multiply(torch.eye(inputs), own.contiguous(), size.outputs, bits)
                found.append((size.outputs, made.numpy().tobytes()))
    return found
