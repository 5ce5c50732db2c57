"""One run of a peer, as a script for the peer's own interpreter: it imports nothing of hpcdecode, but as the peer LLM.

    PYTHON peer_runner.py PEER MODEL ROWS.jsonl NEW_TOKENS OUT.json

Every row gets exactly NEW_TOKENS greedy tokens, in bfloat16 on all CPUs of this process. Loading and compiling are off
the clock. Two timed runs, of one new token and of all, tell the prompts' time from the decoding. OUT.json: `version`,
`seconds`, `prefill_seconds`, `peak_bytes` of this process, `tokens` by row.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter

CPUS = sorted(os.sched_getaffinity(0))


class Transformers:
    """generate() over one left-padded batch, SDPA attention."""

    def __init__(self, model, lengths, new):
        import torch
        import transformers

        torch.set_num_threads(len(CPUS))
        self.torch, self.version = torch, transformers.__version__
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(self, prompts, new):
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
        return out[:, width:].tolist()


class Vllm:
    """The CPU backend, compiled, with its engine in this process."""

    def __init__(self, model, lengths, new):
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE=str(kv_gibibytes(model, lengths, new)),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, CPUS)),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
        )
        import vllm

        self.vllm, self.version = vllm, vllm.__version__
        self.engine = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_num_seqs=len(lengths),
            max_num_batched_tokens=4096,
            max_model_len=max(lengths) + new,
            enable_prefix_caching=False,
        )

    def generate(self, prompts, new):
        greedy = self.vllm.SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        results = self.engine.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return [list(r.outputs[0].token_ids) for r in results]


class OpenVino:
    """GenAI's continuous batching over a converted model, bfloat16 products and KV cache."""

    def __init__(self, model, lengths, new):
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
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": len(CPUS),
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(self, prompts, new):
        import numpy

        greedy = self.genai.GenerationConfig()
        greedy.do_sample, greedy.ignore_eos = False, True
        greedy.max_new_tokens = greedy.min_new_tokens = new
        ids = [self.tensor(numpy.array([p], dtype=numpy.int64)) for p in prompts]
        return [list(r.m_generation_ids[0]) for r in self.pipeline.generate(ids, [greedy] * len(ids))]


class LlamaCpp:
    """llama.cpp's own batches through its C interface, flash attention, a KV cache of float16 for every row."""

    def __init__(self, model, lengths, new):
        import llama_cpp
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
        self.room = options.n_batch

    def generate(self, prompts, new):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        rows, todo = [[] for _ in prompts], []
        for row, prompt in enumerate(prompts):
            todo += [(token, at, row, at + 1 == len(prompt)) for at, token in enumerate(prompt)]
        for step in range(new):
            for first in range(0, len(todo), self.room):
                self._decode(todo[first : first + self.room], rows)
            todo = [(rows[row][-1], len(p) + step, row, True) for row, p in enumerate(prompts)]
        return rows

    def _decode(self, tokens, rows):
        """Run (token, position, row, whether the next one is wanted), and add the likeliest next tokens to `rows`."""
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

    def __init__(self, model, lengths, new):
        import hpcdecode

        self.hpcdecode, self.version = hpcdecode, hpcdecode.__version__
        self.engine = hpcdecode.LLM(model, dtype="bfloat16")

    def generate(self, prompts, new):
        greedy = self.hpcdecode.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        rows = [{"prompt_token_ids": p} for p in prompts]
        return [list(r.outputs[0].token_ids) for r in self.engine.generate(rows, greedy, use_tqdm=False)]


PEERS = {"LLM": Library, "transformers": Transformers, "vllm": Vllm, "openvino": OpenVino, "llama.cpp": LlamaCpp}


def kv_gibibytes(model, lengths, new):
    """Whole GiB that the rows' K and V fill at their full lengths, and one more."""
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 1 + -(-token * sum(n + new for n in lengths) // 2**30)


def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def main(peer, model, rows, new, out):
    sys.path.pop(0)  # this script's folder: its files are not to be taken for a peer's modules
    new = int(new)
    with open(rows) as file:
        prompts = [json.loads(line)["prompt_token_ids"] for line in file]
    engine = PEERS[peer](model, [len(p) for p in prompts], new)
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
