"""What transformers makes of a row: its model's logits, through its own processors, at every position generated.

The tokens of a row are replayed: at each position the token must be the one that transformers' processed logits give,
the largest or, by the same number in (0, 1), the drawn one. A near tie within float32's rounding counts as equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process as hf

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.requests.prompt import Prompt
from hpcdecode.sampling.philox import uniform

LOGIT, SHARE, LOGPROB = 1e-3, 1e-3, 2e-3  # how far floats may be apart: logits, cumulative shares, log-probabilities
NOT_THERE = ("presence_penalty", "frequency_penalty")  # features that transformers lacks


class Oracle:
    """A model of transformers in float32, on the CPU."""

    def __init__(self, folder: str):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.own = Tokenizer.load(folder)
        self.eos = sorted(self.own.eos_token_ids)
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def problems(self, prompt: Prompt, samples: list[dict[str, Any]]) -> list[str]:
        """How the samples of a row differ from what transformers makes of it."""
        if prompt.params.beam_width:
            return self._beams(prompt, samples)
        found = []
        for number, sample in enumerate(samples):
            ids = sample["token_ids"].tolist()
            logits = self._of(prompt.token_ids, ids)
            found += self._tokens(prompt, number, ids, logits)
            found += self._end(prompt, sample, ids)
            found += self._logprobs(prompt, sample, ids, logits)
        return [f"line {prompt.line}: {problem}" for problem in found]

    @torch.inference_mode()
    def _of(self, prompt_ids: list[int], ids: list[int]) -> Tensor:
        """Logits [prompt + generated, vocab]."""
        key = (*prompt_ids, *ids)
        if key not in self._logits:
            self._logits = {key: self.model(torch.tensor([key])).logits[0]}
        return self._logits[key]

    def _tokens(self, prompt: Prompt, sample: int, ids: list[int], logits: Tensor) -> list[str]:
        params, found = prompt.params, []
        if params.structured_outputs or any(getattr(params, name) for name in NOT_THERE):
            return []
        for position, token in enumerate(ids):
            row = logits[len(prompt.token_ids) - 1 + position][None].clone()
            row = self._processed(prompt, ids[:position], row)
            if params.temperature == 0:
                if row[0, token] < row.max() - LOGIT:
                    found.append(f"token {position}: {token} has {row[0, token]:.4f}, {int(row.argmax())} {row.max()}")
                continue
            shares = self._warped(prompt, row).softmax(-1).double()[0].cumsum(0)
            drawn = uniform(*(np.array([x]) for x in (params.seed, prompt.line, sample, position)))[0]
            begin, end = float(shares[token - 1]) if token else 0.0, float(shares[token])
            if not begin - SHARE <= drawn <= end + SHARE:
                found.append(f"token {position}: {token} is drawn by {begin:.5f} to {end:.5f}, got {drawn:.5f}")
        return found

    def _processed(self, prompt: Prompt, made: list[int], row: Tensor) -> Tensor:
        params, ids = prompt.params, torch.tensor([[*prompt.token_ids, *made]])
        if prompt.bad_word_ids and made:
            row = hf.NoBadWordsLogitsProcessor(prompt.bad_word_ids)(torch.tensor([made]), row)
        elif prompt.bad_word_ids:
            row[0, [word[0] for word in prompt.bad_word_ids if len(word) == 1]] = -torch.inf
        ends = [*self.eos, *params.stop_token_ids]
        if params.min_tokens and ends:
            least = hf.MinNewTokensLengthLogitsProcessor(len(prompt.token_ids), params.min_tokens, ends)
            row = least(ids, row)
        if params.logit_bias:
            biases = {(token,): float(bias) for token, bias in params.logit_bias.items()}
            row = hf.SequenceBiasLogitsProcessor(biases)(ids, row)
        if params.repetition_penalty != 1:
            row = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, row)
        return row

    def _warped(self, prompt: Prompt, row: Tensor) -> Tensor:
        params, ids = prompt.params, torch.tensor([prompt.token_ids])
        row = hf.TemperatureLogitsWarper(params.temperature)(ids, row)
        if params.min_p:
            row = hf.MinPLogitsWarper(params.min_p)(ids, row)
        if params.top_k > 0:
            row = hf.TopKLogitsWarper(params.top_k)(ids, row)
        return hf.TopPLogitsWarper(params.top_p)(ids, row) if params.top_p < 1 else row

    def _end(self, prompt: Prompt, sample: dict[str, Any], ids: list[int]) -> list[str]:
        """Whether it ends where it must, and its text."""
        params = prompt.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
        most = min(params.max_tokens, self.model.config.max_position_embeddings - len(prompt.token_ids))
        kept, reason, text, stop = most, "length", "", []
        before = len(self._text(ids[: params.min_tokens], params.skip_special_tokens))
        for count in range(1, most + 1):
            text = self._text(ids[:count], params.skip_special_tokens)
            stop = _found(params.stop, text, before) if count > params.min_tokens else []
            if count > len(ids):
                return [f"ends after {len(ids)} tokens, expected more: {sample['finish_reason']}"]
            if ids[count - 1] in ends or stop:
                kept, reason = count, "stop"
                break
        if (len(ids), sample["finish_reason"]) != (kept, reason):
            return [f"ends after {len(ids)} tokens by {sample['finish_reason']}, expected {kept} by {reason}"]
        if reason == "stop" and ids[-1] in ends:
            shown = ids if params.include_stop_str_in_output else ids[:-1]
            text = self._text(shown, params.skip_special_tokens)
        elif reason == "stop":
            end, found = min(stop)
            text = text[: end if params.include_stop_str_in_output else end - len(found)]
        text = text.replace("\0", "\ufffd")
        return [] if text == sample["text"] else [f"text {sample['text']!r}, expected {text!r}"]

    def _text(self, ids: list[int], skip: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip)

    def _logprobs(self, prompt: Prompt, sample: dict[str, Any], ids: list[int], logits: Tensor) -> list[str]:
        found, table = [], logits.log_softmax(-1)
        first = len(prompt.token_ids)
        if prompt.params.logprobs is not None:
            found += _compare(table[first - 1 : first - 1 + len(ids)], ids, sample, "", prompt.params.logprobs)
        if prompt.params.prompt_logprobs is not None and sample["sample"] == 0 and first > 1:
            cut = {name: values[1:] for name, values in sample.items() if name.startswith("prompt_") and _many(values)}
            found += _compare(table[: first - 1], prompt.token_ids[1:], cut, "prompt_", prompt.params.prompt_logprobs)
        return found

    @torch.inference_mode()
    def _beams(self, prompt: Prompt, samples: list[dict[str, Any]]) -> list[str]:
        params = prompt.params
        most = min(params.max_tokens, self.model.config.max_position_embeddings - len(prompt.token_ids))
        made = self.model.generate(
            torch.tensor([prompt.token_ids]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            early_stopping=False,
            length_penalty=params.length_penalty,
            max_new_tokens=most,
            eos_token_id=None if params.ignore_eos else self.eos,
            pad_token_id=self.eos[0],
        )[:, len(prompt.token_ids) :].tolist()
        found = []
        for sample, expected in zip(samples, made, strict=True):
            ids = sample["token_ids"].tolist()
            if ids != expected[: len(ids)] or any(token != self.eos[0] for token in expected[len(ids) :]):
                found.append(f"line {prompt.line}: beam {sample['sample']}: {ids}, expected {expected}")
        return found


def _found(stops: tuple[str, ...], text: str, before: int) -> list[tuple[int, str]]:
    """Return where each stop string ends that ends behind the first `before` characters, and that string."""
    begins = ((text.find(s, max(before - len(s) + 1, 0)), s) for s in stops)
    return [(begin + len(s), s) for begin, s in begins if begin >= 0]


def _many(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.ndim > 0


def _compare(table: Tensor, ids: list[int], held: dict[str, Any], prefix: str, count: int) -> list[str]:
    """Log-probabilities of tokens and of the most likely ones, against those of the table [tokens, vocab]."""
    own = table.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    if not np.allclose(held[f"{prefix}logprobs"], own, atol=LOGPROB):
        return [f"{prefix}logprobs {held[f'{prefix}logprobs']}, expected {own}"]
    if not count:
        return []
    top = table.topk(count).values.numpy()
    named = table.gather(1, torch.tensor(held[f"{prefix}top_token_ids"]).long()).numpy()
    same = np.allclose(held[f"{prefix}top_logprobs"], top, atol=LOGPROB) and np.allclose(named, top, atol=LOGPROB)
    return [] if same else [f"{prefix}top_logprobs {held[f'{prefix}top_logprobs']}, expected {top}"]
