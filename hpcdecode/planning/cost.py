"""What a step costs: the S-part by tokens, attention by cached tokens, and the wire by bytes.

A turn of the lanes is one layer of each, and takes as long as the longest of what it needs: the S-rank's slices of all
lanes; each R-rank's attention of all lanes; the wire; any lane's own way there and back; and, where ranks share cores,
their share of all that the ranks do. A step is a turn a layer.
"""

from __future__ import annotations

import msgspec
import numpy as np

from hpcdecode.errors import UserError
from hpcdecode.planning.hardware import BANDWIDTH, COMPUTE, Device

WIDTH = 2  # bytes of weights and activations


class ModelSize(msgspec.Struct, frozen=True):
    """Of a decoder. body, head: weights of all layers, and of the logits; q, k, v: columns of a token in a layer."""

    layers: int
    body: int
    head: int
    q: int
    k: int
    v: int
    positions: int | None

    @classmethod
    def of(cls, directory: str) -> ModelSize:
        """From a model directory's config.json; no weights are needed. UserError where that has none that is known."""
        import torch
        from transformers import AutoModelForCausalLM

        from hpcdecode.model.frontend.config import read_config

        config = read_config(directory)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{directory}: expected the config.json of a decoder: {error}") from None
        head = model.get_output_embeddings().weight.numel()
        embedding = model.get_input_embeddings().weight.numel()
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        total = sum(p.numel() for p in model.parameters())
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            body=total - embedding - (0 if tied else head),
            head=head,
            q=heads * width,
            k=kv_heads * width,
            v=kv_heads * width,
            positions=getattr(config, "max_position_embeddings", None),
        )

    def kv_bytes(self, width: float = WIDTH) -> float:
        """Of a cached token, all layers."""
        return self.layers * (self.k + self.v) * width

    @property
    def weight_bytes(self) -> float:
        return WIDTH * (self.body + self.head)

    @property
    def wire_bytes(self) -> float:
        """Of a token, all layers, both ways: (2 + 2/G)*e*d a layer."""
        return WIDTH * self.layers * (2 * self.q + self.k + self.v)


class Cost(msgspec.Struct, frozen=True):
    """Seconds. tokens, body: of all slices for so many tokens, linear between and beyond, with what goes with them on
    the S-rank. drawn, logits: the same for the tokens that draw, with planning and sampling. chunk: beyond that, of a
    lane's step that carries prompt tokens; prefill: of a query and a key. attend: of a cached token, all layers, on
    one R-rank (R); row: of a sequence beyond that; begin: of a lane's step; append: of a prompt token. wire: of a
    token, both ways, all layers. latency: of a message. shared: of the sum of all ranks' seconds, what none can save
    because they share cores; 0 for ranks with cores of their own, 1 for one process."""

    layers: int
    tokens: list[int]
    body: list[float]
    drawn: list[int]
    logits: list[float]
    attend: float
    row: float
    prefill: float
    wire: float
    latency: float
    chunk: float = 0.0
    begin: float = 0.0
    append: float = 0.0
    shared: float = 0.0

    def body_seconds(self, tokens: float) -> float:
        """T(tokens) of all layers."""
        return _at(self.tokens, self.body, tokens)

    def logits_seconds(self, tokens: float) -> float:
        return _at(self.drawn, self.logits, tokens)

    def lane(self, tokens: float, prompts: float, pairs: float, reads: np.ndarray, rows: np.ndarray) -> TurnSeconds:
        """What a lane needs in a step of so many tokens. prompts: those of prompts; pairs: their queries and keys;
        reads, rows: cached tokens and sequences that every R-rank attends to."""
        busy = 1.0 if tokens else 0.0
        return TurnSeconds(
            s=self.body_seconds(tokens) + self.prefill * pairs + self.chunk * min(prompts, 1.0),
            r=self.attend * reads + self.row * rows + self.append * prompts / len(reads) + self.begin * busy,
            wire=self.wire * tokens,
            wait=2 * self.layers * self.latency * busy,
        )


def _at(sizes: list[int], seconds: list[float], size: float) -> float:
    if not size:
        return 0.0
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, seconds))
    return seconds[-1] + (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) * (size - sizes[-1])


class TurnSeconds(msgspec.Struct, frozen=True):
    """Seconds of a lane, over all layers: on the S-rank, on every R-rank, on the wire, and in which nothing is used."""

    s: float
    r: np.ndarray
    wire: float
    wait: float


def step_seconds(lanes: list[TurnSeconds], shared: float = 0.0) -> float:
    """Of one step of all lanes, without their logits. shared: as of a Cost."""
    s, r = sum(lane.s for lane in lanes), sum(lane.r for lane in lanes)
    return max(
        s,
        float(r.max()),
        shared * (s + float(r.sum())),
        sum(lane.wire for lane in lanes),
        max(lane.s + lane.wire + lane.wait + max(float(lane.r.max()), shared * float(lane.r.sum())) for lane in lanes),
    )


def of_devices(size: ModelSize, s: Device, r: Device, link: float, latency: float, kv_width: float = WIDTH) -> Cost:
    """From data sheets. link: bytes per second in and out of the S-rank; latency: seconds of a message.

    Several S devices split every layer, and sum up their results in a ring twice a layer.
    """
    if not s.flops:
        raise UserError(f"S device: expected one with a rate of matrix products, got {s.name}; calibrate on it instead")
    flops, s_read, r_read = s.flops * COMPUTE, s.bandwidth * BANDWIDTH, r.bandwidth * BANDWIDTH
    tokens = [1 << i for i in range(14)]
    reduced = 4 * size.layers * (s.count - 1) / s.count * WIDTH * size.q / s.link if s.count > 1 else 0.0

    def products(weights: int) -> list[float]:
        return [max(2 * weights * t / flops, WIDTH * weights / s_read) for t in tokens]

    return Cost(
        layers=size.layers,
        tokens=tokens,
        body=[seconds + reduced * t for seconds, t in zip(products(size.body), tokens, strict=True)],
        drawn=tokens,
        logits=products(size.head),
        attend=size.kv_bytes(kv_width) / r_read,
        row=0.0,
        prefill=4 * size.q * size.layers / flops,
        wire=size.wire_bytes / link,
        latency=latency,
    )
