"""The size of a model from its config.json, against what the engine holds and sends."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from hpcdecode.attention.cpu_states import CpuStateStore, reserved_bytes
from hpcdecode.attention.open import open_layers
from hpcdecode.attention.recurrent_shapes import example_weights
from hpcdecode.attention.shapes import LayerShape, attention_shapes, recurrent_shapes
from hpcdecode.attention.sizes import ENDLESS_BLOCK, block_tokens_for, bytes_per_token, capacity_for, state_tokens_for
from hpcdecode.bench.stateful_layers import KNOWN
from hpcdecode.exchange.device import PlainMemory
from hpcdecode.exchange.memory import RankMemory
from hpcdecode.exchange.shares import Share
from hpcdecode.model import load_split
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.planning.group_shape import member_bytes
from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.layer_work import attend_flop, of_member, state_bytes_moved, state_flop
from hpcdecode.planning.model_size import ModelSize, WeightBits
from hpcdecode.ranks.wishes import GroupShape
from hpcdecode.schedule.plan import Plan

HYBRIDS = ("qwen3_next", "kimi_linear", "falcon_h1", "nemotron_h", "lfm2", "qwen4_exp_text")
LATENTS = ("deepseek_v3", "minicpm3")
STATES = ("mamba2", "mamba")
PLAIN = ("llama3", "gpt_oss")


@pytest.fixture(scope="module")
def sized(checkpoint):
    """Return a function: a model's size, and the shapes that a job on CPUs has."""

    def get(name):
        directory = checkpoint(name)
        model = load_split(directory, dtype="bfloat16", weights=False)
        return ModelSize.from_directory(str(directory)), list(model.attends)

    return get


@pytest.mark.parametrize("name", HYBRIDS + LATENTS + STATES + PLAIN)
def test_layers_are_those_of_a_job(sized, name):
    size, shapes = sized(name)
    assert list(size.shapes) == shapes and size.layers == len(shapes)
    assert size.keeps_states == (name in HYBRIDS + STATES)
    assert any(s.latent for s in attention_shapes(shapes)) == (name in (*LATENTS, "kimi_linear"))
    assert size.kv_bytes_per_token("int8") == (bytes_per_token(shapes, "int8") if attention_shapes(shapes) else 0)


@pytest.mark.parametrize("name", HYBRIDS + LATENTS + STATES + PLAIN)
def test_the_wire_has_the_bytes_of_messages(sized, name):
    """Of decode rows between ranks that share no memory: what MPI sends there and back, all layers."""
    size, shapes = sized(name)
    rows = 5
    share = Share(Plan(decode=np.array([[0, slot] for slot in range(rows)], np.int32)), 0)
    none = torch.empty(0, dtype=torch.uint8)
    memory, sent = RankMemory(torch.bfloat16, (none, none), PlainMemory()), 0
    for shape in shapes:
        (message,) = memory.messages(share.pieces_of(shape), shape)
        sent += sum(len(buffer[0]) for buffer in (message.qkv, message.answer))
    assert size.wire_bytes_per_token == sent / rows > 0


def test_tables_of_several_tokens_are_held_whole_and_not_multiplied(checkpoint):
    directory = checkpoint("qwen4_exp_text")
    size, tensors = ModelSize.from_directory(str(directory)), open_checkpoint(directory)
    numbers = {key: math.prod(tensor.shape) for key, tensor in tensors.items() if tensor.dtype != "I64"}
    assert size.table_weights == sum(n for key, n in numbers.items() if ".ngram_embedding." in key) > 0
    others = size.layer_weights + size.head_weights
    assert others + size.table_weights == sum(n for key, n in numbers.items() if "embed_tokens" not in key)
    whole = size.table_weights + size.embedding_weights
    member = member_bytes(size, GroupShape(2, 1))
    assert member == others + 2 * whole  # bytes: half of the others in bfloat16


def test_an_embedding_is_held_whole_and_once():
    """By each member of the first stage; one that is tied is what a member multiplies by for the logits, too."""
    layers, head = 1000, 100
    apart = ModelSize(layers, head, ModelSize.alike(4, 1, 1, 8, 8, 8).shapes, None, 8, embedding_weights=head)
    tied = replace(apart, tied=True)
    assert (apart.weight_bytes, tied.weight_bytes) == (2 * (layers + 2 * head), 2 * (layers + head))
    one, two, staged = GroupShape(1, 1), GroupShape(2, 1), GroupShape(1, 2)
    assert (member_bytes(apart, one), member_bytes(tied, one)) == (apart.weight_bytes, tied.weight_bytes)
    assert (member_bytes(apart, two), member_bytes(tied, two)) == (2 * (500 + 50 + 100), 2 * (500 + 100))
    assert member_bytes(apart, staged) == member_bytes(tied, staged) >= 2 * (layers / 2 + head)
    packed = replace(tied, bits=WeightBits(head=4.0))
    assert packed.weight_bytes == tied.weight_bytes + head / 2


@pytest.mark.parametrize("name", HYBRIDS + STATES + PLAIN)
def test_sequences_count_as_they_do_in_the_store(sized, name):
    """Seven sequences of two blocks: what is used of a capacity that is just enough for them."""
    size, shapes = sized(name)
    unit = KvUnit.of(size.shapes, "bfloat16")
    block = block_tokens_for(shapes, "bfloat16")
    tokens, state = min(2 * block, 128), state_tokens_for(shapes, "bfloat16", block)
    assert (unit.state_tokens, unit.endless) == (state, name in STATES)
    sequences = 7
    cache = open_layers(
        shapes,
        [example_weights(shape) for shape in recurrent_shapes(shapes)],
        kv_dtype="bfloat16",
        capacity_tokens=int(sequences * unit.held(tokens)),
        max_sequences=8,
    )
    slots = np.arange(sequences, dtype=np.int32)
    cache.extend(slots, np.full(sequences, tokens, np.int32))
    assert cache.used_tokens == sequences * unit.held(tokens) == cache.capacity_tokens and cache.free_blocks == 0
    reserved = reserved_bytes(recurrent_shapes(shapes))
    nbytes = sequences * (reserved if unit.endless else tokens * unit.token_bytes + state * unit.token_bytes)
    assert unit.capacity(nbytes) == capacity_for(shapes, "bfloat16", int(nbytes), None, state)
    assert unit.fixed_tokens * unit.token_bytes >= reserved


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("state_dtype, number_bytes", [("float32", 4), ("bfloat16", 2)])
def test_a_step_moves_the_bytes_of_the_store(name, element_bytes, state_dtype, number_bytes):
    from msgspec.structs import replace

    shape = replace(KNOWN[name], element_bytes=element_bytes, state_dtype=state_dtype)
    store = CpuStateStore([shape], [example_weights(shape)], 3, 1, None, False, None)
    slots, one = np.arange(3, dtype=np.int32), np.ones(3, np.int32)
    rows = torch.zeros(3, shape.row_columns, dtype=torch.bfloat16 if element_bytes == 2 else torch.float32)
    store.extend(slots, one)
    store.run(0, slots, one, rows, rows.new_empty(3, shape.out_columns))
    assert store.bytes_moved == 3 * state_bytes_moved([shape])
    assert store.state_bytes == reserved_bytes([shape]) >= number_bytes * shape.heads * shape.k_dim * shape.v_dim


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture
def from_config(tmp_path):
    """Return a function: the size of a model whose config.json states this."""

    def get(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelSize.from_directory(str(tmp_path))

    return get


def test_deepseek_v3(from_config):
    """A latent of 512 + 64 columns; 128 heads of absorbed q and of o on the wire."""
    size, layers = from_config(DEEPSEEK), 61
    assert size.kv_bytes_per_token() == layers * 1152 and size.kv_bytes_per_token("int8") == layers * 580
    assert size.wire_bytes_per_token == layers * 279_680
    assert attend_flop(size.shapes) == layers * 128 * (576 + 512) * 2
    member = of_member(size.shapes, 8)
    assert attend_flop(member) == attend_flop(size.shapes) / 8 and {s.kv_columns for s in member} == {576}


def test_qwen3_next_80b(from_config):
    """80 billion weights of which 3 are active; 12 layers with K and V, 36 with a state of 32 heads of 128 x 128."""
    size = from_config(QWEN3_NEXT)
    assert (size.layer_weights + 2 * size.head_weights) / 1e9 == pytest.approx(80, rel=0.01)
    assert size.active_weights() / 1e9 == pytest.approx(3.25, rel=0.01)
    assert len(attention_shapes(size.shapes)) == 12 and size.kv_bytes_per_token() == 12 * 2 * 2 * 2 * 256
    states, window = 36 * 32 * 128 * 128 * 4, 36 * 4 * (2 * 16 + 32) * 128 * 2
    assert state_bytes_moved(size.shapes) == 2 * states + window
    assert state_flop(size.shapes) == 36 * (7 * 32 * 128 * 128 + 2 * 4 * 64 * 128)
    unit = KvUnit.of(size.shapes, "bfloat16")
    assert states <= unit.state_tokens * unit.token_bytes <= states + window + 64 * unit.token_bytes


def test_a_model_of_states_alone_has_a_block_a_sequence():
    layers = [KNOWN["mamba2"]] * 3
    unit = KvUnit.of(layers, "bfloat16")
    assert unit.endless and unit.held(10) == unit.held(1000) == unit.fixed_tokens == ENDLESS_BLOCK
    assert unit.capacity(10.5 * reserved_bytes(layers)) == 10 * ENDLESS_BLOCK and unit.capacity(-5.0) == 0


def test_layers_alike_are_counted_by_columns():
    size = ModelSize.alike(3, 1000, 100, 4096, 1024, 1024)
    assert size.shapes == (LayerShape(8, 128, 128, 32, 128**-0.5),) * 3 and size.hidden == 4096
    assert size.wire_bytes_per_token == 3 * 2 * (4096 + 1024 + 1024 + 4096) and size.o_columns == 4096


def test_a_size_is_kept_until_what_it_depends_on_changes(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama3"), folder)
    made = ModelSize.from_directory(str(folder))
    (file,) = (tmp_path / "cache").glob("*.size")
    with monkeypatch.context() as patched:
        patched.setattr(ModelSize, "_measured", None)  # it must not be called
        assert ModelSize.from_directory(str(folder)) == made
    file.write_bytes(file.read_bytes()[:-1])
    assert ModelSize.from_directory(str(folder)) == made
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2 * config["vocab_size"]}))
    assert ModelSize.from_directory(str(folder)).head_weights == 2 * made.head_weights
