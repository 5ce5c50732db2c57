"""Streamed text: what is shown, token by token, is always the begin of what the result says at the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.requests.stops import Stops
from hpcdecode.serve.detokenizer import TokenKinds
from hpcdecode.serve.text_stream import HeldText, TextStream
from tests.support.models import EOS, tokenizer

PIECES = ["▁a", "b", "▁", "ab", "é", "▁▁c", "<", "中"]


def byte_fallback() -> PreTrainedTokenizerFast:
    """Decodes as SentencePiece does: Llama 2's tokenizer, with a vocabulary of bytes and a few pieces."""
    names = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"))
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def kinds_of(backend: PreTrainedTokenizerFast) -> TokenKinds:
    return TokenKinds(Tokenizer(backend, frozenset([EOS]), len(backend)))


KINDS = {"bytes": kinds_of(tokenizer()), "fallback": kinds_of(byte_fallback())}
TEXTS = ["naïve", "日本語", "🙂🙂", "abab", " a", "\n", "é"]


def tokens(kinds: TokenKinds) -> st.SearchStrategy[list[int]]:
    """Tokens at random, among them the bytes of characters that are no tokens, and broken ones."""
    backend, size = kinds.tokenizer.backend, len(kinds.tokenizer.backend)
    bytes_of = {backend.convert_ids_to_tokens(i): i for i in range(size)}
    written = [[bytes_of.get(f"<0x{b:02X}>", 5) for b in text.encode()] for text in TEXTS]
    written += [backend(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    one = st.integers(0, size - 1).map(lambda i: [i])
    piece = st.one_of(one, st.sampled_from(written), st.just([size - 1, size - 2]))
    return st.lists(piece, min_size=1, max_size=40).map(lambda lists: [i for part in lists for i in part])


def generated(kinds: TokenKinds, ids: list[int], params: SamplingParams) -> SequenceState:
    """Return a sequence whose sampler drew `ids`, as far as the engine lets it go."""
    stops = Stops(kinds.tokenizer.eos_token_ids, kinds.tokenizer.decode)
    sequence = SequenceState(Request(Prompt(1, "1", [5], params), len(ids), 0))
    for token in ids:
        sequence.accept(token, stops)
        if sequence.finish_reason:
            break
    return sequence


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_shown_begins_the_text_of_the_result(name, data):
    kinds = KINDS[name]
    ids = data.draw(tokens(kinds))
    params = SamplingParams(
        stop=tuple(data.draw(st.lists(st.sampled_from(["ab", "a", "ba", "bab", "本", "  ", "é"]), max_size=3))),
        min_tokens=data.draw(st.integers(0, 20)),
        stop_token_ids=tuple(data.draw(st.lists(st.sampled_from(ids), max_size=1))),
        ignore_eos=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    sequence = generated(kinds, ids, params)
    text = sequence.text(kinds.tokenizer.decode)
    stream, shown, at = TextStream(kinds, params), "", 0
    while at < len(sequence.generated):
        step = data.draw(st.integers(1, 3))
        shown += stream.feed(sequence.generated[at : at + step])
        at += step
        assert text.startswith(shown)
    assert shown + stream.rest(text) == text


@pytest.mark.parametrize("name", KINDS)
def test_text_comes_as_soon_as_it_is_complete(name):
    kinds = KINDS[name]
    backend = kinds.tokenizer.backend
    ids = backend("a 🙂b", add_special_tokens=False)["input_ids"]
    if name == "fallback":
        bytes_of = {backend.convert_ids_to_tokens(i): i for i in range(len(backend))}
        ids = [bytes_of["▁a"], bytes_of["▁"], *(bytes_of[f"<0x{b:02X}>"] for b in "🙂".encode()), bytes_of["b"]]
    stream = TextStream(kinds, SamplingParams())
    deltas = [stream.feed([token]) for token in ids]
    assert "".join(deltas) == kinds.tokenizer.decode(ids) == "a 🙂b"
    assert deltas[0] == "a" and not any("\ufffd" in delta for delta in deltas)


def test_a_long_text_is_decoded_in_windows_of_bounded_size(monkeypatch):
    kinds, longest = kinds_of(byte_fallback()), 0
    decode = kinds.tokenizer.decode

    def counted(ids, skip_special_tokens=True):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens)

    ids = [kinds.tokenizer.backend.convert_tokens_to_ids(piece) for piece in ["▁a", "b", "▁▁c", "中"] * 100]
    monkeypatch.setattr(kinds.tokenizer, "decode", counted)
    stream = TextStream(kinds, SamplingParams())
    assert "".join(stream.feed([token]) for token in ids) == decode(ids)
    assert longest <= 16


def test_a_stop_string_is_held_back_until_a_token_comes_after_it():
    held = HeldText(("END", "\n\n"))
    assert [held.feed(text, True) for text in ("abcE", "N", "x", "\n", "END", "y")] == [
        "abc",
        "",
        "ENx",
        "",
        "\n",
        "ENDy",
    ]
    assert [held.feed(text, whole) for text, whole in (("END", False), ("", True), ("z", True))] == ["", "", "ENDz"]
