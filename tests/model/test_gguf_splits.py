"""Texts are split into words as the vocabulary of a GGUF file says."""

from __future__ import annotations

import pytest
import transformers

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.folder import model_folder
from tests.support.gguf_models import make

TEXT = "It's 12345 Wörter, 你好world!\n\n  x_1"
WORDS = {  # of that text, by the names of vocabularies
    "deepseek-v3": ["It", "'s", "Ġ", "123", "45", "ĠWÃ¶rter", ",", "Ġ", "ä½łå¥½", "world", "!ĊĊ", "Ġ", "Ġx", "_", "1"],
    "deepseek-llm": [
        *(
            "It",
            "'",
            "s",
            "Ġ",
            "12345",
            "ĠW",
            "Ã¶",
            "rter",
            ",",
            "Ġ",
            "ä½łå¥½",
            "world",
            "!",
            "Ċ",
            "Ċ",
            "Ġ",
            "Ġx",
            "_",
            "1",
        ),
    ],
    "glm4": ["It", "'s", "Ġ", "123", "45", "ĠWÃ¶rter", ",", "Ġä½łå¥½world", "!ĊĊ", "Ġ", "Ġx", "_", "1"],
    "kimi-k2": ["It's", "Ġ", "123", "45", "ĠWÃ¶rter", ",", "Ġ", "ä½łå¥½", "world", "!ĊĊ", "Ġ", "Ġx", "_", "1"],
    "seed-coder": [
        *("It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠWÃ¶rter", ",", "Ġä½łå¥½world", "!", "ĊĊ", "Ġ", "Ġx", "_", "1"),
    ],
    "refact": [
        *("It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠWÃ¶rter", ",", "Ġä½łå¥½world", "!", "ĊĊĠ", "Ġx", "_", "1"),
    ],
    "olmo": ["It", "'s", "Ġ12345", "ĠWÃ¶rter", ",", "Ġä½łå¥½world", "!", "ĊĊĠ", "Ġx", "_", "1"],
}


@pytest.mark.parametrize("name", WORDS)
def test_texts_are_split_as_the_vocabulary_says(name, tmp_path):
    file = make("smollm3", tmp_path, **{"tokenizer.ggml.pre": name})[1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(file))
    assert [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)] == WORDS[name]


def test_a_vocabulary_that_splits_in_an_unknown_way_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"words are split in a known way, got 'new'"):
        model_folder(make("smollm3", tmp_path, **{"tokenizer.ggml.pre": "new"})[1])
