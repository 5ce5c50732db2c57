"""The tokenizer: equal to transformers' own, alone or in chunks; what it refuses."""

import json
import random
import shutil
from pathlib import Path

import pytest

from hpcdecode.data.prompts import encoding as tokens
from hpcdecode.data.prompts.columns import unpack
from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.prompts.rows import Row, RowError, read_rows
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt

DEMO = Path(__file__).parents[2] / "jobs" / "demo" / "model"
PARAMS = SamplingParams()
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def model_dir(tmp_path):
    for path in DEMO.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def row(line=1, prompt=None, ids=None, messages=None):
    return Row(line, str(line), prompt, ids, messages, PARAMS)


def random_texts(count):
    rng = random.Random(3)
    words = ["class", " the", "\n\n", "  ", "é", "日本", "😀", "<|end_of_text|>", "\0", " a.b", "x" * 40]
    return ["".join(rng.choices(words, k=rng.randint(1, 30))) for _ in range(count)]


def test_encode_equals_transformers(tokenizer, reference):
    for text in random_texts(200):
        assert tokenizer.encode(row(prompt=text)) == reference(text)["input_ids"]


def test_decode_equals_transformers_and_leaves_special_tokens_out(tokenizer, reference):
    for text in random_texts(50):
        ids = reference(text)["input_ids"] + [reference.eos_token_id]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert "<|" not in tokenizer.decode([reference.bos_token_id, reference.eos_token_id])


def test_chunks_give_what_single_rows_give_in_order(tokenizer):
    rows = [row(i, prompt=text) for i, text in enumerate(random_texts(300), start=1)]
    rows[10] = row(11, ids=[5, 6, 7])
    rows[20] = RowError(21, "21", "bad line")
    rows[30] = row(31, ids=[tokenizer.vocab_size])
    out = list(tokenized(rows, tokenizer, 2048))
    assert [o.line for o in out] == list(range(1, 301))
    assert out[10].token_ids == [5, 6, 7] and out[20] is rows[20]
    assert isinstance(out[30], RowError)
    for given, made in zip(rows, out, strict=True):
        if isinstance(made, Prompt):
            assert made.token_ids == tokenizer.encode(given) and made.params is PARAMS


def test_the_first_rows_do_not_wait_for_a_whole_chunk(tokenizer):
    taken = []
    rows = (taken.append(i) or row(i, prompt="a b c") for i in range(1, 1000))
    stream = tokenized(rows, tokenizer, 2048)
    next(stream)
    assert len(taken) == 1
    for _ in range(500):
        next(stream)
    assert len(taken) <= 501 + tokens.CHUNK_ROWS


def test_one_unusable_prompt_spoils_no_neighbour(tokenizer):
    rows = [row(i, prompt="\ud800" if i == 5 else "fine") for i in range(1, 20)]
    out = list(tokenized(rows, tokenizer, 2048))
    assert [o.line for o in out if isinstance(o, RowError)] == [5]
    assert "the tokenizer refused the text" in out[4].reason


def test_context_limit_leaves_room_for_one_token(tokenizer):
    fits, too_long = tokenized([row(1, ids=[9] * 63), row(2, ids=[9] * 64)], tokenizer, 64)
    assert len(fits.token_ids) == 63
    assert "expected at most 63 tokens (the model's context of 64 less one new token), got 64" in too_long.reason


def test_a_huge_prompt_is_refused_by_its_beginning(tokenizer, monkeypatch):
    lengths = []
    encode_texts = Tokenizer.encode_texts
    monkeypatch.setattr(
        Tokenizer, "encode_texts", lambda self, t, *a: lengths.append(max(map(len, t))) or encode_texts(self, t, *a)
    )
    (error,) = tokenized([row(prompt="some words " * 3_000_000)], tokenizer, 128)
    assert "got more than" in error.reason and max(lengths) <= 32 * 128


def test_a_long_text_of_few_tokens_is_not_refused(tokenizer):
    token = max(range(300, tokenizer.vocab_size), key=lambda i: len(tokenizer.decode([i])))
    text = tokenizer.decode([token]) * 40
    (prompt,) = tokenized([row(prompt=text)], tokenizer, len(text) // tokens.PROBE_CHARACTERS - 1)
    assert prompt.token_ids == tokenizer.encode(row(prompt=text))


def test_messages_go_through_the_chat_template(model_dir):
    edit(model_dir / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(model_dir)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_dir).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode(row(messages=messages)) == reference
    assert tokenizer.decode(reference) == "<user>hi\n<assistant>yes\n<assistant>"
    with pytest.raises(RowProblem, match="chat template refused them: no system role"):
        tokenizer.encode(row(messages=[{"role": "system", "content": "x"}]))


def test_a_chat_template_of_the_processor_is_taken_if_the_tokenizer_has_none(model_dir):
    said = row(messages=[{"role": "user", "content": "hi"}])
    (model_dir / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert Tokenizer.load(model_dir).text(said) == "<user>hi\n<assistant>"
    edit(model_dir / "tokenizer_config.json", chat_template=CHAT_TEMPLATE.replace("assistant", "model"))
    assert Tokenizer.load(model_dir).text(said) == "<user>hi\n<model>"


def test_messages_need_a_chat_template(tokenizer):
    with pytest.raises(RowProblem, match="this one has none; use prompt"):
        tokenizer.encode(row(messages=[{"role": "user", "content": "hi"}]))


def test_token_ids_are_checked_against_the_models_vocabulary(tokenizer, model_dir):
    with pytest.raises(RowProblem, match=r"expected token ids in \[0, 2048\), got 2048"):
        tokenizer.encode(row(ids=[1, 2048]))
    edit(model_dir / "config.json", vocab_size=3000)
    assert Tokenizer.load(model_dir).encode(row(ids=[2999])) == [2999]


def test_a_tokenizer_larger_than_the_model_is_a_row_error(model_dir):
    edit(model_dir / "config.json", vocab_size=100)
    (error,) = tokenized([row(prompt="the interpreter")], Tokenizer.load(model_dir), 64)
    assert "expected token ids in [0, 100)" in error.reason


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"eos_token_id": 7}, {}, {7}), ({"eos_token_id": [7, 8]}, {}, {7, 8}), (None, {"eos_token_id": [3]}, {3})],
)
def test_eos_comes_from_generation_config_then_config(model_dir, generation, config, expected):
    (model_dir / "generation_config.json").unlink()
    if generation is not None:
        (model_dir / "generation_config.json").write_text(json.dumps(generation))
    edit(model_dir / "config.json", **config)
    assert Tokenizer.load(model_dir).eos_token_ids == expected


def test_eos_comes_from_the_tokenizer_at_last(model_dir, reference):
    (model_dir / "generation_config.json").unlink()
    edit(model_dir / "config.json", eos_token_id=None)
    assert Tokenizer.load(model_dir).eos_token_ids == {reference.eos_token_id}


def test_missing_files_are_named(tmp_path, model_dir):
    with pytest.raises(UserError, match="expected a directory with a Hugging Face model"):
        Tokenizer.load(tmp_path / "none")
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"expected tokenizer\.json, or tokenizer\.model, or vocab\.json and merges"):
        Tokenizer.load(model_dir)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_broken_files_are_a_user_error(model_dir, name, content):
    (model_dir / name).write_text(content)
    with pytest.raises(UserError, match=r"expected .*got"):
        Tokenizer.load(model_dir)


SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_scaling_is_no_matter_of_tokenizers(model_dir, kind):
    """As Llama 3.1, gpt-oss and Phi-3 state it. The class of all configs knows no length to scale."""
    edit(model_dir / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    plain = Tokenizer.load(model_dir).encode_texts(["Return a 12"])
    edit(model_dir / "config.json", rope_theta=10000.0, rope_scaling={"rope_type": kind, **SCALED[kind]})
    assert Tokenizer.load(model_dir).encode_texts(["Return a 12"]) == plain


def test_code_beside_the_model_never_runs(model_dir):
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "vocab.txt").write_text("a\n")
    (model_dir / "own.py").write_text(f"open({str(model_dir / 'ran')!r}, 'w')\nclass Own: pass\n")
    edit(model_dir / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(UserError):
        Tokenizer.load(model_dir)
    assert not (model_dir / "ran").exists()


def test_from_file_to_prompts(tmp_path, tokenizer):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Return a"}\nnot json\n{"prompt": "x y", "max_tokens": 3}\n')
    first, error, last = tokenized(read_rows([str(path)], PARAMS), tokenizer, 512)
    assert tokenizer.decode(first.token_ids) == "Return a"
    assert (error.line, last.line, last.params.max_tokens) == (2, 3, 3)


def test_texts_of_prompts_are_kept_and_messages_as_they_are_rendered(tmp_path, model_dir):
    edit(model_dir / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    tokenizer, kept = Tokenizer.load(model_dir), KeptColumns(Selection(ALL))
    messages = [{"role": "user", "content": "Return a"}]
    rows = [{"prompt": "x y"}, {"messages": messages}, {"prompt_token_ids": [5, 6]}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = list(tokenized(read_rows([str(path)], PARAMS, kept=kept), tokenizer, 512, kept))
    texts, columns = zip(*(unpack(kept.take(prompt.line)) for prompt in made), strict=True)
    assert texts[0] == "x y" and texts[2] is None and "Return a" in texts[1] and texts[1] != "Return a"
    assert tokenizer.encode_texts([texts[1]], add_special_tokens=False)[0] == made[1].token_ids
    assert json.loads(columns[1]["messages"].data) == messages and json.loads(columns[2]["prompt_token_ids"].data) == [
        5,
        6,
    ]


def test_truncated_prompts_keep_their_special_tokens_and_last_tokens(tokenizer, reference):
    for text in random_texts(50):
        ids = reference(text)["input_ids"]
        for count in (1, 2, len(ids) // 2 + 1, len(ids), len(ids) + 5):
            reference.truncation_side = "left"
            expected = reference(text, truncation=True, max_length=count)["input_ids"]
            assert tokenizer.encode_last(row(prompt=text), count) == expected
    assert tokenizer.encode_last(row(ids=[9, 8, 7, 6]), 2) == [7, 6]


@pytest.mark.parametrize(("truncate", "max_tokens", "length"), [(5, 10, 5), (40, 10, 40), (-1, 10, 54), (None, 10, 60)])
def test_prompts_are_truncated_as_their_row_asks(tokenizer, truncate, max_tokens, length):
    params = SamplingParams(truncate_prompt_tokens=truncate, max_tokens=max_tokens)
    rows = [Row(1, "1", "a b " * 200, None, None, params), Row(2, "2", None, list(range(60)), None, params)]
    text, ids = tokenized(rows, tokenizer, 64)
    assert ids.token_ids == list(range(60))[-length:]
    assert isinstance(text, RowError) if truncate is None else len(text.token_ids) == length


def test_truncation_to_what_there_is_room_for_needs_room(tokenizer):
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=64)
    (error,) = tokenized([Row(1, "1", "a", None, None, params)], tokenizer, 64)
    assert "got a context of 64 tokens and max_tokens 64; lower max_tokens" in error.reason


def test_bad_words_are_forbidden_with_and_without_a_space(tokenizer):
    plain, spaced = (tokenizer.encode_texts([text], False)[0] for text in ("the", " the"))
    assert len(plain) == len(spaced) and plain != spaced
    assert tokenizer.bad_word_ids(("the", " the")) == [plain, spaced] * 2
    params = SamplingParams(bad_words=("the",))
    (prompt,) = tokenized([Row(1, "1", "a", None, None, params)], tokenizer, 64)
    assert prompt.bad_word_ids == [plain, spaced]


@pytest.mark.parametrize("field", [{"logit_bias": {2048: 1.0}}, {"stop_token_ids": (2048,)}], ids=str)
def test_token_ids_of_sampling_fields_are_checked_against_the_vocabulary(tokenizer, field):
    (error,) = tokenized([Row(1, "1", "a", None, None, SamplingParams(**field))], tokenizer, 64)
    assert error.reason == f"{next(iter(field))}: expected token ids in [0, 2048), got 2048"


def test_a_beam_needs_a_token_of_its_own(model_dir):
    edit(model_dir / "config.json", vocab_size=100)
    few = Tokenizer.load(model_dir, skip=True)
    rows = [Row(line, "", None, [5], None, SamplingParams(beam_width=width)) for line, width in ((1, 100), (2, 101))]
    fitting, error = tokenized(rows, few, 64)
    assert isinstance(fitting, Prompt) and error.reason.startswith("beam_width: expected at most 100, the vocabulary's")
