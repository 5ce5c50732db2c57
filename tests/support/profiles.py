"""A profile of the demo model that no machine measured, with costs that make one layout the fastest."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcdecode.planning.cost import Cost
from hpcdecode.planning.profile import MemberCosts, Profile

ALONE = Cost(5, [1, 512], [1e-2, 3e-2], [1, 512], [1e-3, 3e-3], 2e-6, 1e-5, 1e-8, 0.0, 0.0, shared_core_fraction=1.0)
SPLIT = msgspec.structs.replace(ALONE, message_latency_seconds=1e-4, shared_core_fraction=0.0)
FLOAT32_TOKEN = 3840.0  # bytes of K and V


LLAMA_8B_CONFIG = {  # what a plan depends on
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def profile(ranks: int, *, slower_replicas: float = 1.0) -> Profile:
    """Return a profile in which replicas are faster than a split, unless they are slowed down."""
    seconds = [slower_replicas * s for s in ALONE.slice_seconds]
    replica = msgspec.structs.replace(ALONE, slice_seconds=seconds) if ranks > 1 else None
    cost = SPLIT if ranks > 1 else ALONE
    return Profile({}, "demo", "float32", "float32", ranks, cost, {}, replica, FLOAT32_TOKEN)


def with_sums(found: Profile, latency: float, *members: int) -> Profile:
    """Return a profile that has measured sums of so many members, which take this latency each."""
    return msgspec.structs.replace(found, sums=[MemberCosts(each, latency, 1e-9) for each in members])


def old_profile(ranks: int) -> Profile:
    """Return a profile of the time before there were replicas."""
    return msgspec.structs.replace(profile(ranks), replica=None, token_bytes=0.0)


def write(path: Path, profile: Profile) -> str:
    """Write a profile as `hpcdecode calibrate` does; return the path."""
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)
