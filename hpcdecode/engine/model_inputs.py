"""What the slices and the prompts' attention take in a step: the same on all members of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from hpcdecode.schedule.plan import Plan
from hpcdecode.schedule.step import PromptPart
from hpcdecode.system.uploads import upload

LOGITS_AT_ONCE = 256  # tokens whose logits are in memory together, if many are asked for


class StepTokens(NamedTuple):
    """A step's tokens.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        logits_indices: int64 [L], indices of the tokens whose logits are needed.
        adapters: int64 [T], numbers of the tokens' adapters, -1 for none; or None if no token has any.
    """

    ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    adapters: Tensor | None = None

    @property
    def context(self) -> tuple[Tensor, ...]:
        """Return the context of the first slice."""
        return tuple(x for x in self if x is not None)


@dataclass(frozen=True)
class ModelInputs:
    """What a lane runs in one step.

    Attributes:
        decodes: Number of decode rows, the first of all rows.
        tokens: Those of decode rows, then those of prompts.
        parts: What attends from prompts, in the order of their rows.
        skipped_queries: By part, how many of its first tokens need no logits.
        forgotten: Keys of prefixes whose K and V are not needed any more.
        largest: Whether no more of the logits is needed than the largest one of every token.
        by_parts: Whether logits are computed part by part, since those of many prompt tokens are asked for.
        state_rows: How many of the tokens whose logits are computed are asked for hidden states alone, the last ones.
    """

    decodes: int
    tokens: StepTokens
    parts: Sequence[PromptPart] = ()
    skipped_queries: Sequence[int] = ()
    forgotten: Sequence[int] = ()
    largest: bool = False
    by_parts: bool = False
    state_rows: int = 0

    @property
    def state_part(self) -> slice:
        """Return which of the tokens whose logits are needed are asked for hidden states alone."""
        count = len(self.tokens.logits_indices)
        return slice(count - self.state_rows, count)

    @property
    def logits_parts(self) -> list[slice]:
        """Return the parts of the tokens whose logits are needed that are computed one after another."""
        count = self.state_part.start
        size = LOGITS_AT_ONCE if self.by_parts else max(count, 1)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def on(self, device: torch.device) -> ModelInputs:
        """Return the same with its tokens on a device."""
        return replace(self, tokens=StepTokens(*upload(device, *(x.numpy() for x in self.tokens.context))))


class StepOrder(msgspec.Struct, frozen=True, array_like=True):
    """What a group's home tells the other members to run: a plan, and what the model takes, if it runs.

    Attributes:
        plan: The plan's int32 elements.
        decodes: As in ModelInputs, and so are the others.
        tokens: int64 elements of each tensor that is there; nothing if the model does not run.
    """

    plan: bytes
    decodes: int = 0
    tokens: list[bytes] = []
    parts: list[PromptPart] = []
    skipped_queries: list[int] = []
    forgotten: list[int] = []
    largest: bool = False
    by_parts: bool = False
    state_rows: int = 0

    @classmethod
    def of(cls, plan: Plan, inputs: ModelInputs | None, forgotten: Sequence[int]) -> StepOrder:
        """Return the order to run a plan.

        Args:
            plan: the plan.
            inputs: on the host, or None if the model does not run.
            forgotten: keys of prefixes, if it does not.
        """
        wire = np.empty(plan.length, np.int32)
        plan.encode(wire)
        if inputs is None:
            return cls(wire.tobytes(), forgotten=list(forgotten))
        tokens = [x.numpy().tobytes() for x in inputs.tokens.context]
        lists = list(inputs.parts), list(inputs.skipped_queries), list(inputs.forgotten)
        asked = inputs.largest, inputs.by_parts, inputs.state_rows
        return cls(wire.tobytes(), inputs.decodes, tokens, *lists, *asked)

    def decoded_plan(self) -> Plan:
        """Return the plan."""
        return Plan.decode_from(np.frombuffer(self.plan, np.int32))

    def inputs(self) -> ModelInputs:
        """Return what the model takes, on the host."""
        tokens = StepTokens(*(torch.from_numpy(np.frombuffer(wire, np.int64).copy()) for wire in self.tokens))
        lists = self.parts, self.skipped_queries, self.forgotten
        return ModelInputs(self.decodes, tokens, *lists, self.largest, self.by_parts, self.state_rows)
