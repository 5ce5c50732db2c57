"""Formats of bitsandbytes: int8 rows (LLM.int8), and 4-bit codes of a table in blocks (QLoRA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from hpcdecode.model.frontend.quantization.formats import (
    BYTES,
    CHANNEL,
    FLOATS,
    INT8,
    ScaleBlock,
    Templates,
    WeightFormat,
    WrongTensorsError,
    expect_dtype,
    expect_shape,
    finite,
    looked_up,
    pairs,
)
from hpcdecode.model.frontend.tensors import CheckpointTensor

TABLE = 16  # numbers that 4 bits choose from
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NESTED_TABLE = 256
MOST_STATE = 1 << 16  # bytes of a description
MOST_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Int8Rows(WeightFormat):
    """int8 weights [out, in] with the largest absolute value of each row: w = q * SCB / 127."""

    name: str = "bitsandbytes 8 bit"
    dtypes: frozenset[str] = INT8
    ending: str = ".weight"
    plain_ending: str = ".weight"
    needed: Templates = field(default_factory=lambda: {"scale": ("{module}.SCB",)})
    optional: Templates = field(default_factory=lambda: {"layout": ("{module}.weight_format",)})

    def shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        """Return the shape of a weight, or raise WrongTensorsError."""
        shape = parts["codes"].shape
        if len(shape) != 2:
            raise WrongTensorsError(f"expected a matrix, got the shape {list(shape)}")
        expect_dtype("SCB", parts["scale"], FLOATS)
        expect_shape("SCB", parts["scale"], shape[:1], (*shape[:1], 1))
        if (layout := parts.get("layout")) is not None and (layout.dtype != "U8" or bool(layout().any())):
            raise WrongTensorsError("expected the weight format 0, rows as they are, got another")
        return shape

    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return codes, and scales [out, 1]."""
        largest = finite("SCB", parts["scale"].to(torch.float32))
        return {"codes": parts["codes"], "scale": largest.reshape(-1, 1) / 127}

    def scale_block(self) -> ScaleBlock:
        """Return which elements share a scale: those of a row."""
        return CHANNEL

    def stored(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return the codes of some rows, uint8 [rows, in]."""
        return parts["codes"][first:last].view(torch.uint8)

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return rows of a weight."""
        return parts["codes"][first:last].to(torch.float32).mul_(parts["scale"][first:last])


class QuantState(msgspec.Struct):
    """What is read of bitsandbytes' description of a weight."""

    quant_type: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float | None = None


@dataclass(frozen=True, kw_only=True)
class FourBits(WeightFormat):
    """4-bit codes of a table in blocks of the flat weight: w[i] = quant_map[q[i]] * absmax[i // blocksize].

    The first of two codes is in the upper half of a byte. If absmax is quantised itself (double quantisation), it is
    nested_quant_map[absmax[b]] * nested_absmax[b // nested_blocksize] + nested_offset.

    Attributes:
        kind: Which table: nf4 or fp4.
    """

    kind: str
    name: str = "bitsandbytes 4 bit"
    dtypes: frozenset[str] = BYTES
    ending: str = ".weight"
    plain_ending: str = ".weight"
    optional: Templates = field(
        default_factory=lambda: {name: (f"{{key}}.{name}",) for name in ("nested_absmax", "nested_quant_map")}
    )

    @classmethod
    def of(cls, kind: str) -> FourBits:
        """Return the format of a kind."""
        state = f"{{key}}.quant_state.bitsandbytes__{kind}"
        return cls(
            kind=kind, needed={"absmax": ("{key}.absmax",), "quant_map": ("{key}.quant_map",), "state": (state,)}
        )

    def shape(self, parts: Mapping[str, CheckpointTensor]) -> tuple[int, ...]:
        """Return the shape of a weight, or raise WrongTensorsError."""
        state = self._state(parts["state"])
        count = state.shape[0] * state.shape[1]
        blocks = -(-count // state.blocksize)
        expect_shape("codes", parts["codes"], (-(-count // 2), 1), (1, -(-count // 2)), (-(-count // 2),))
        expect_shape("absmax", parts["absmax"], (blocks,))
        expect_shape("quant_map", parts["quant_map"], (TABLE,))
        if state.nested_blocksize is None:
            expect_dtype("absmax", parts["absmax"], FLOATS)
        else:
            missing = {"nested_absmax", "nested_quant_map"} - parts.keys()
            if missing:
                raise WrongTensorsError(f"expected {min(missing)} beside a nested absmax, got none")
            expect_dtype("a nested absmax", parts["absmax"], BYTES)
            expect_shape("nested_absmax", parts["nested_absmax"], (-(-blocks // state.nested_blocksize),))
            expect_shape("nested_quant_map", parts["nested_quant_map"], (NESTED_TABLE,))
        return state.shape

    def is_nf4(self, parts: Mapping[str, CheckpointTensor], inputs: int) -> bool:
        """Return whether codes are those of NF4, and so many inputs in a row always share a scale."""
        state, table = self._state(parts["state"]), parts["quant_map"]().to(torch.float32)
        shared = state.shape[1] % inputs == 0 == state.blocksize % inputs
        return shared and torch.equal(table, torch.tensor(NF4_VALUES))

    def _state(self, stored: CheckpointTensor | Tensor) -> QuantState:
        """Return the description in `stored`, JSON in bytes."""
        if math.prod(stored.shape) > MOST_STATE:
            raise WrongTensorsError(f"expected a description of at most {MOST_STATE} bytes, got {list(stored.shape)}")
        try:
            text = bytes((stored if isinstance(stored, Tensor) else stored()).tolist())
            state = msgspec.json.decode(text, type=QuantState)
        except (ValueError, TypeError, RecursionError) as e:
            raise WrongTensorsError(f"expected bitsandbytes' description of a weight, got: {e}") from e
        blocks = (state.blocksize, state.nested_blocksize or 1)
        if state.quant_type != self.kind or min(*blocks, *state.shape) < 1 or max(blocks) > MOST_BLOCK:
            raise WrongTensorsError(f"expected a description of {self.kind} weights, got {text.decode()!r:.200}")
        return state

    def prepared(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return codes in one row, the table, and a scale for each block."""
        state = self._state(parts["state"])
        scale = parts["absmax"]
        if state.nested_blocksize is not None:
            of_block = parts["nested_absmax"].float().repeat_interleave(state.nested_blocksize)[: len(scale)]
            scale = parts["nested_quant_map"].float()[scale.int()] * of_block + (state.nested_offset or 0.0)
        return {
            "codes": parts["codes"].flatten(),
            "table": pairs(finite("numbers of quant_map", parts["quant_map"].to(torch.float32)), lower_first=False),
            "scale": finite("absmax", scale.to(torch.float32)),
            "sizes": torch.tensor([shape[1], state.blocksize]),
        }

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Return rows of a weight."""
        columns, block = parts["sizes"].tolist()
        start, end = first * columns, last * columns
        codes = parts["codes"][start // 2 : -(-end // 2)]
        values = looked_up(codes, parts["table"])[start % 2 :][: end - start]
        scale = parts["scale"][start // block : -(-end // block)]
        return values.mul_(scale.repeat_interleave(block)[start % block :][: end - start]).view(-1, columns)
