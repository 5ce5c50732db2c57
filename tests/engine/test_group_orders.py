"""What home tells the other members arrives as it was sent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from hpcdecode.engine.model_inputs import ModelInputs, StepOrder, StepTokens
from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.step import PromptPart


def sent(order: StepOrder) -> StepOrder:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=StepOrder)


@pytest.mark.parametrize("adapters", [None, torch.arange(7) % 3 - 1])
def test_an_order_to_run_a_step(adapters):
    tables = {"release": [[0, 4]], "fork": [[0, 1, 2]], "decode": [[0, 1], [1, 3]], "prefill": [[1, 0, 2, 5]]}
    plan = Plan(number=7, **{name: np.array(rows, np.int32) for name, rows in tables.items()})
    parts = [PromptPart(key=9, start=64, count=5, length=80, shared=64, prefix=3), PromptPart(4, 0, 2, 9, resumed=3)]
    tokens = StepTokens(torch.arange(7), torch.arange(7) + 10, torch.tensor([0, 1, 6]), adapters)
    order = sent(StepOrder.of(plan, ModelInputs(2, tokens, parts, [4, 0], [11], largest=True), [11]))
    inputs, again = order.inputs(), order.decoded_plan()
    assert (inputs.decodes, inputs.parts, inputs.skipped_queries, inputs.forgotten) == (2, parts, [4, 0], [11])
    assert inputs.largest and all(torch.equal(a, b) for a, b in zip(inputs.tokens.context, tokens.context, strict=True))
    assert len(tokens.context) == 3 + (adapters is not None)
    assert again.number == 7 and not again.stop
    assert all(np.array_equal(getattr(again, name), getattr(plan, name)) for name in tables)


def test_an_order_to_apply_a_plan_alone():
    order = sent(StepOrder.of(Plan(number=3, stop=True), None, [5, 6]))
    assert not order.tokens and order.forgotten == [5, 6] and order.decoded_plan().stop


def test_parts_of_prompts_say_whether_they_begin_and_complete():
    whole, first, last = PromptPart(1, 0, 9, 9), PromptPart(1, 64, 3, 80, shared=64), PromptPart(1, 70, 10, 80)
    assert whole.begins and whole.completes
    assert first.begins and not first.completes
    assert last.completes and not last.begins
