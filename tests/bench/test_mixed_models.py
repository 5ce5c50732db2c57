"""Models of benchmarks whose layers are not all alike: their sizes, their ideal, and what peers get of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import peer_runner
from hpcdecode.bench.contenders import Peer, Site
from hpcdecode.bench.limits import PREFILL_TOKENS, IdealTimes, ideal
from hpcdecode.bench.mixed_models import MixedShape, products_of
from hpcdecode.errors import UserError

LATENT = LayerShape(kv_heads=1, k_dim=576, v_dim=512, q_heads=16, scale=1.0, latent=True)
STATE = RecurrentShape(heads=8, k_heads=1, k_dim=16, v_dim=32, taps=0)


def test_the_projections_of_a_model_are_all_but_embedding_and_logits():
    shape = products_of("deepseek-v2")
    q, latent, o = 2048 * 16 * 192, 2048 * 576 + 512 * 16 * 256, 16 * 128 * 2048
    assert shape.layer_weights == 8 * (q + latent + o + 3 * 2048 * 5632)
    norms = 8 * (2 * 2048 + 512) + 2048
    assert shape.weight_bytes == 2 * (shape.layer_weights + 2 * 32_000 * 2048 + norms)
    assert len(shape.linears) == 8 * 7 and shape.vocabulary == 32_000


def test_the_ideal_of_latents_and_states_by_hand():
    shape = MixedShape(8, 1, 1, 1, 0, vocabulary=10, matrices=((8, 16), (16, 8)), kept=(LATENT, STATE, STATE))
    assert (shape.kv_bytes, shape.pair_flop) == (2 * 576, 2 * 16 * (576 + 512))
    assert shape.state_bytes == 2 * 4 * 8 * 16 * 32
    limits = IdealTimes(body={PREFILL_TOKENS: 2.0, 2: 0.5}, head={2: 0.25}, read=1e6)
    found, without = (ideal(one, [5, 5], 4, limits) for one in (shape, replace(shape, kept=(LATENT,))))
    cached = 2 * ((5 + 1) + (5 + 2) + (5 + 3))
    assert without.decode_seconds == pytest.approx(3 * 0.75 + cached * 1152 / 1e6)
    assert found.decode_seconds - without.decode_seconds == pytest.approx(3 * 2 * 2 * shape.state_bytes / 1e6)
    assert found.prefill_seconds == without.prefill_seconds


@pytest.mark.parametrize(
    ("config", "bytes_of_two_rows"),
    [
        ({"num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2 * 4 * 10**6 * 576 * 2),
        ({"num_key_value_heads": 4, "head_dim": 128}, 2 * 4 * 10**6 * 2 * 4 * 128 * 2),
        (
            {"num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 1 << 15},
            2 * 4 * (10**6 * 2 * 4 * 128 * 2 + 4 * 48 * 64 * (1 << 15)),
        ),
    ],
)
def test_peers_get_room_for_keys_values_latents_and_states(tmp_path, monkeypatch, config, bytes_of_two_rows):
    monkeypatch.setattr(peer_runner, "DTYPE", "bfloat16")
    common = {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps({**common, **config}))
    found = peer_runner.kv_gibibytes(str(tmp_path), [10**6 - 100] * 2, 100)
    assert found == 1 + -(-bytes_of_two_rows // 2**30)


def test_llama_cpp_wants_a_file_of_models_that_are_no_llama(tmp_path):
    (tmp_path / "mixed-deepseek-v2").mkdir()
    peer = Peer(Site(tmp_path, "deepseek-v2"), "llama.cpp", "python3")
    with pytest.raises(UserError, match=r"expected .*model\.gguf.* convert_hf_to_gguf\.py"):
        peer._model()
    assert not (tmp_path / "llama.cpp-deepseek-v2").exists()
