"""Run a peer once.

    PYTHON peer_runner.py PEER MODEL ROWS.jsonl NEW_TOKENS OUT.json [SPECULATIVE_CONFIG]

A script for the peer's own interpreter: it imports nothing of hpcdecode, but as the peer LLM. Every row gets exactly
NEW_TOKENS greedy tokens, on all CPUs of this process: in bfloat16, or in float32 if they do not multiply it, as peers
refuse it then or are slower. Loading and compiling are off the clock. Two timed runs, of one new token and of all,
tell the prompts' time from the decoding. OUT.json has `version`, `seconds`, `prefill_seconds`, `peak_bytes` of this
process, and `tokens` by row.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

CPUS = sorted(os.sched_getaffinity(0))
with open("/proc/cpuinfo") as info:
    DTYPE = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(info.read().split()) else "float32"

_BEGINNING = 256  # tokens; if rows begin with the same ones, vLLM's cache of prefixes is on
Rows = list[list[int]]  # token ids of every row
Speculative = dict[str, Any] | None  # settings of speculative decoding


class PeerEngine(Protocol):
    """A loaded engine.

    Attributes:
        version: As the engine says.
    """

    version: str

    def generate(self, prompts: Rows, new: int) -> Rows:
        """Return `new` greedy tokens for every prompt."""


class Transformers:
    """generate() over one left-padded batch, SDPA attention."""

    def __init__(self, model: str, lengths: list[int], new: int):
        import torch
        import transformers

        torch.set_num_threads(len(CPUS))
        self.torch, self.version = torch, transformers.__version__
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, DTYPE))
        self.model = loaded.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def generate(self, prompts: Rows, new: int) -> Rows:
        """Return `new` greedy tokens for every prompt."""
        torch, width, pad = self.torch, max(map(len, prompts)), self.model.config.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=None,
                pad_token_id=pad,
            )
        tokens: Rows = out[:, width:].tolist()
        return tokens


class Vllm:
    """The CPU backend, compiled, with its engine in this process."""

    def __init__(self, model: str, lengths: list[int], new: int, speculative: Speculative = None, shared: bool = False):
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE=str(kv_gibibytes(model, lengths, new)),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, CPUS)),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
        )
        import vllm

        self.vllm, self.version, self.shared = vllm, vllm.__version__, shared
        self.engine = vllm.LLM(
            model=model,
            dtype=DTYPE,
            max_num_seqs=len(lengths),
            max_num_batched_tokens=4096,
            max_model_len=max(lengths) + new,
            enable_prefix_caching=shared,
            speculative_config=speculative,
        )

    def generate(self, prompts: Rows, new: int) -> Rows:
        """Return `new` greedy tokens for every prompt."""
        greedy = self.vllm.SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        if self.shared:
            self.engine.reset_prefix_cache()  # of the run before
        results = self.engine.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return [list(r.outputs[0].token_ids) for r in results]


class OpenVino:
    """GenAI's continuous batching over a converted model."""

    def __init__(self, model: str, lengths: list[int], new: int):
        import openvino
        import openvino_genai

        self.genai, self.tensor = openvino_genai, openvino.Tensor
        self.version = openvino_genai.__version__.partition("-")[0]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = len(lengths)
        scheduler.cache_size = kv_gibibytes(model, lengths, new)
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": DTYPE.replace("loat", ""),
            "KV_CACHE_PRECISION": DTYPE.replace("loat", ""),
            "INFERENCE_NUM_THREADS": len(CPUS),
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(self, prompts: Rows, new: int) -> Rows:
        """Return `new` greedy tokens for every prompt."""
        import numpy

        greedy = self.genai.GenerationConfig()
        greedy.do_sample, greedy.ignore_eos = False, True
        greedy.max_new_tokens = greedy.min_new_tokens = new
        ids = [self.tensor(numpy.array([p], dtype=numpy.int64)) for p in prompts]
        return [list(r.m_generation_ids[0]) for r in self.pipeline.generate(ids, [greedy] * len(ids))]


class _Token(NamedTuple):
    """A token to run.

    Attributes:
        token: Its id.
        position: In its row.
        row: Index of the row.
        last: Whether the token after it is wanted.
    """

    token: int
    position: int
    row: int
    last: bool


class LlamaCpp:
    """llama.cpp's own batches through its C interface, flash attention, a KV cache of float16 for every row."""

    def __init__(self, model: str, lengths: list[int], new: int):
        import llama_cpp  # type: ignore[import-not-found]  # in the peer's own environment
        import numpy

        self.api, self.numpy, self.version = llama_cpp, numpy, llama_cpp.__version__
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max = len(lengths)
        options.n_ctx = len(lengths) * -(-(max(lengths) + new) // 256) * 256
        options.n_batch, options.n_ubatch = 2048, 512
        options.n_threads = options.n_threads_batch = len(CPUS)
        options.flash_attn_type = 1
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        self.most_tokens = options.n_batch

    def generate(self, prompts: Rows, new: int) -> Rows:
        """Return `new` greedy tokens for every prompt."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        rows: Rows = [[] for _ in prompts]
        todo: list[_Token] = []
        for row, prompt in enumerate(prompts):
            todo += [_Token(token, at, row, at + 1 == len(prompt)) for at, token in enumerate(prompt)]
        for step in range(new):
            for first in range(0, len(todo), self.most_tokens):
                self._decode(todo[first : first + self.most_tokens], rows)
            todo = [_Token(rows[row][-1], len(p) + step, row, True) for row, p in enumerate(prompts)]
        return rows

    def _decode(self, tokens: list[_Token], rows: Rows) -> None:
        """Run tokens, and add the likeliest next tokens to `rows`."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, last) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        ends = [row for _, _, row, last in tokens if last]
        if ends:
            shape = len(ends), self.vocabulary
            logits = self.numpy.ctypeslib.as_array(self.api.llama_get_logits(self.context), shape)
            for row, token in zip(ends, logits.argmax(1).tolist(), strict=True):
                rows[row].append(token)


class Library:
    """hpcdecode's own, as a user's script has it."""

    def __init__(self, model: str, lengths: list[int], new: int, speculative: Speculative = None):
        import hpcdecode

        self.hpcdecode, self.version = hpcdecode, hpcdecode.__version__
        self.engine = hpcdecode.LLM(model, dtype=DTYPE, speculative_config=speculative)

    def generate(self, prompts: Rows, new: int) -> Rows:
        """Return `new` greedy tokens for every prompt."""
        greedy = self.hpcdecode.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        rows = [{"prompt_token_ids": p} for p in prompts]
        return [list(r.outputs[0].token_ids) for r in self.engine.generate(rows, greedy, use_tqdm=False)]


PEERS: dict[str, Callable[..., PeerEngine]] = {
    "LLM": Library,
    "transformers": Transformers,
    "vllm": Vllm,
    "openvino": OpenVino,
    "llama.cpp": LlamaCpp,
}


def kv_gibibytes(model: str, lengths: list[int], new: int) -> int:
    """Return the whole GiB that the rows' K, V and recurrent states fill at their full lengths, and one more."""
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    heads = config.get("num_key_value_heads", 0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    columns = 2 * heads * head_dim  # of a token, K and V or a latent
    if "kv_lora_rank" in config:
        columns = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    mamba = [config.get(f"mamba_{name}", 0) for name in ("n_heads", "d_head", "d_state")]
    delta = [config.get(f"linear_{name}", 0) for name in ("num_value_heads", "key_head_dim", "value_head_dim")]
    state = 4 * max(a * b * c for a, b, c in (mamba, delta))
    filled = (2 if DTYPE == "bfloat16" else 4) * columns * sum(n + new for n in lengths) + state * len(lengths)
    return int(1 + -(-config["num_hidden_layers"] * filled // 2**30))


def peak_bytes() -> int:
    """Return the peak of this process's resident memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def main(peer: str, model: str, rows: str, new_tokens: str, out: str, speculative: str | None = None) -> None:
    """Run a peer on a file of rows, and write what it took."""
    sys.path.pop(0)  # this script's folder: its files are not to be taken for a peer's modules
    new = int(new_tokens)
    with open(rows) as file:
        prompts = [json.loads(line)["prompt_token_ids"] for line in file]
    given: dict[str, Any] = {"speculative": json.loads(speculative)} if speculative else {}
    if peer == "vllm":
        given["shared"] = len({tuple(p[:_BEGINNING]) for p in prompts}) < len(prompts)
    engine = PEERS[peer](model, [len(p) for p in prompts], new, **given)
    engine.generate(prompts[:4], 4)
    seconds = []
    for count in (1, new):
        start = perf_counter()
        tokens = engine.generate(prompts, count)
        seconds.append(perf_counter() - start)
    result = {"version": engine.version, "seconds": seconds[1], "prefill_seconds": seconds[0]}
    with open(out, "w") as file:
        json.dump({**result, "peak_bytes": peak_bytes(), "tokens": tokens}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
