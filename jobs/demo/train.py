"""Train the demo model: a small Llama on the text of corpus.py, on one CPU thread.

    python jobs/demo/train.py [--minutes 20] [--steps 4500] [--out jobs/demo/model] [--start MODEL]

The learning rate follows max(steps done, minutes gone), so that a slow machine stops in time with a finished
schedule; where the steps come first, the seed decides everything. Every window begins like a prompt does: with the
BOS token and the start of a sentence or paragraph. The first part runs on short windows, the rest on short and long
ones in turn.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import documents
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
START = re.compile(r"(?:^|\n\n\s*|[.:] +|[.:]\n *)(?=\S)")  # of a paragraph or a sentence
VOCAB = 2048
TOKENS_PER_STEP = 2048
SHORT, MIXED, MIXED_FROM = 128, (128, 256, 512, 1024), 0.6  # window lengths, and where they begin to mix
PEAK_RATE, WARMUP = 3e-3, 0.03


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCAB, min_frequency=2, special_tokens=[BOS, EOS], show_progress=False)
    ids = [(token, bpe.token_to_id(token)) for token in (BOS, EOS)]
    bpe.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_model(bos: int, eos: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos)
    return model


def examples(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[torch.Tensor]:
    """Every text from each of its sentences and paragraphs on: BOS, then no more than the longest window, or EOS."""
    found = []
    for text in texts:
        rests = [text[match.end() :][: 8 * max(MIXED)] for match in START.finditer(text)]
        for ids in tokenizer(rests, verbose=False)["input_ids"]:
            found.append(torch.tensor([*ids, tokenizer.eos_token_id][: max(MIXED) + 1], dtype=torch.int32))
    return found


def windows(found: list[torch.Tensor], generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Endless batches [rows, length + 1] of int64 of random examples; `length` is sent in."""
    length = SHORT
    while True:
        rows = [_window(found, length + 1, generator) for _ in range(TOKENS_PER_STEP // length)]
        length = (yield torch.stack(rows).long()) or length


def _window(found: list[torch.Tensor], length: int, generator: torch.Generator) -> torch.Tensor:
    pieces, filled = [], 0
    while filled < length:
        pieces.append(found[int(torch.randint(len(found), (1,), generator=generator))])
        filled += len(pieces[-1])
    return torch.cat(pieces)[:length]


def learning_rate(progress: float) -> float:
    if progress < WARMUP:
        return PEAK_RATE * (progress + 1e-3) / WARMUP
    return PEAK_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))))


def optimizer_for(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), foreach=True)


def save(model: LlamaForCausalLM, out: Path) -> None:
    """bf16 safetensors; the float32 weights in training stay as they are."""
    state = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = model.generation_config
    copy.save_pretrained(out)


def train(
    model: LlamaForCausalLM, found: list[torch.Tensor], steps: int, minutes: float, out: Path, begin: float = 0.0
) -> None:
    """begin: the share of the schedule that the weights have behind them."""
    batches = windows(found, torch.Generator().manual_seed(1))
    optimizer, smooth, start, saved, step = optimizer_for(model), None, time.monotonic(), time.monotonic(), 0
    batch = next(batches)
    while (done := max(step / steps, (time.monotonic() - start) / (60 * minutes))) < 1:
        progress = begin + (1 - begin) * done
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        step += 1
        if step % 20 == 0:
            print(f"step {step} loss {smooth:.3f} minutes {(time.monotonic() - start) / 60:.1f}", flush=True)
        if time.monotonic() - saved > 120:
            save(model, out)
            saved = time.monotonic()
        batch = batches.send(SHORT if progress < MIXED_FROM else MIXED[step % len(MIXED)])
    save(model, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--start", type=Path, help="a model of an earlier run; continue where the windows begin to mix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = documents()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.start) if args.start else build_tokenizer(texts)
    found = examples(texts, tokenizer)
    model = build_model(tokenizer.bos_token_id, tokenizer.eos_token_id)
    if args.start:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32).state_dict())
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{len(texts)} texts, {sum(map(len, texts))} characters, {len(found)} examples, {count} parameters", flush=True
    )
    tokenizer.save_pretrained(args.out)
    train(model, found, args.steps, args.minutes, args.out, MIXED_FROM if args.start else 0.0)


if __name__ == "__main__":
    main()
