"""Sizes of the models that the figures are about, from the papers that published them."""

from __future__ import annotations

from hpcdecode.planning.model_size import ModelSize


def _decoder(layers: int, hidden: int, mlp: int, vocabulary: int, gated: bool) -> ModelSize:
    """Return a decoder with as many KV heads as heads; weights of norms and biases are not counted."""
    layer_weights = layers * (4 * hidden**2 + (3 if gated else 2) * hidden * mlp)
    return ModelSize.alike(layers, layer_weights, vocabulary * hidden, hidden, hidden, hidden)


def llama(layers: int, hidden: int, mlp: int) -> ModelSize:
    """Return a Llama (Touvron et al. 2023, table 2)."""
    return _decoder(layers, hidden, mlp, 32_000, True)


def opt(layers: int, hidden: int) -> ModelSize:
    """Return an OPT (Zhang et al. 2022, table 1)."""
    return _decoder(layers, hidden, 4 * hidden, 50_272, False)


def paper(layers: int, hidden: int, weights: float) -> ModelSize:
    """Return a model of as many weights as a paper states, its embedding not counted apart."""
    return ModelSize.alike(layers, int(weights), 0, hidden, hidden, hidden)


SHAPES = {
    "llama-7b": llama(32, 4096, 11008),
    "llama-13b": llama(40, 5120, 13824),
    "llama-33b": llama(60, 6656, 17920),
    "llama-65b": llama(80, 8192, 22016),
    "opt-125m": opt(12, 768),
    "opt-1.3b": opt(24, 2048),
    "opt-6.7b": opt(32, 4096),
    "opt-66b": opt(64, 9216),
    "opt-175b": opt(96, 12288),
    "lamina-13b": paper(40, 5120, 13e9),  # table 2
    "lamina-33b": paper(60, 6656, 64.6e9 / 2),  # table 4, of bfloat16
    "lamina-65b": paper(80, 8192, 65.2e9),  # Touvron et al. 2023
}
LAMINA = {"13B": "lamina-13b", "33B": "lamina-33b", "65B": "lamina-65b"}
