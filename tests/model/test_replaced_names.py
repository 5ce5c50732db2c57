"""Names of transformers' modules mean something else in a block, and what they meant before after it."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.llama import modeling_llama

from hpcdecode.model.frontend.replaced_names import replaced_names

MODULES = [modeling_llama.LlamaRMSNorm(4), modeling_llama.LlamaRMSNorm(8), nn.Linear(2, 2)]


def test_names_of_every_defining_module_are_replaced_by_name_and_value():
    rotate, linear = modeling_llama.rotate_half, nn.modules.linear.Linear
    with replaced_names(MODULES, lambda name, value: "other" if value is rotate or name == "Linear" else None):
        assert modeling_llama.rotate_half == "other" == nn.modules.linear.Linear
        assert modeling_llama.LlamaRMSNorm is type(MODULES[0])
    assert modeling_llama.rotate_half is rotate and nn.modules.linear.Linear is linear


def test_names_are_back_after_an_error_in_the_block_and_in_the_choice():
    rotate = modeling_llama.rotate_half
    with pytest.raises(ZeroDivisionError), replaced_names(MODULES, lambda n, v: "x" if v is rotate else None):
        raise ZeroDivisionError
    assert modeling_llama.rotate_half is rotate

    def choose(name: str, value: object) -> object:
        if name == "repeat_kv":  # behind rotate_half in its module
            assert modeling_llama.rotate_half == "x"
            raise KeyError(name)
        return "x" if value is rotate else None

    with pytest.raises(KeyError), replaced_names(MODULES, choose):
        pass
    assert modeling_llama.rotate_half is rotate
