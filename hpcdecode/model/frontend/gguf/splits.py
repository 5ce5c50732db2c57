"""How vocabularies of byte-level BPE split a text into words, by the names of GGUF files.

Sources: the tokenizers of the models, and what llama.cpp takes the names for. Transformers knows others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdecode.model.frontend.gguf.header import GgufHeader
from hpcdecode.model.frontend.gguf.metadata import refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
THREE_DIGITS = rf"{WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
ONE_DIGIT = rf"{WORDS}|\p{{N}}|{SYMBOLS}|{SPACES}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
UPPER, LOWER = (f"[{letters}&&[^\\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
)
CASED = (  # letters with a case, of which scripts that are rare in texts are left out
    r"[\p{Lu}\p{Ll}\p{Lt}\x{295}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7ff}\x{ab30}-\x{ab6d}\x{10570}-\x{105bb}\x{10d50}-\x{10d85}\x{16e40}-\x{16ed3}"
    r"\x{1d400}-\x{1dfff}]]"
)
DEEPSEEK_V2 = (
    r"[\r\n]",
    rf"\s?{CASED}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
SEED = rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
SPLITS: dict[str, tuple[str, ...]] = {  # regular expressions, each for what those before it have left
    "deepseek-v3": DEEPSEEK,
    "deepseek-llm": DEEPSEEK_V2,
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), (THREE_DIGITS,)),
    "kimi-k2": (KIMI,),
    "seed-coder": (SEED,),
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), (ONE_DIGIT,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "granite-docling"), (GPT2,)),
}


def set_split(tokenizer: PreTrainedTokenizerFast, header: GgufHeader, *, known_alone: bool) -> None:
    """Let a tokenizer that transformers converted split a text as its vocabulary does.

    Args:
        tokenizer: The tokenizer.
        header: Header of the file that it comes from.
        known_alone: Whether to refuse vocabularies whose way is not known.

    Raises:
        UserError: If it is refused.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = header.values.get("tokenizer.ggml.pre")
    if header.values.get("tokenizer.ggml.model") != "gpt2" or name in (None, *GGUF_PRE_TOKENIZER_SPLITS):
        return
    if name not in SPLITS:
        if known_alone:
            raise refused(header, f"a vocabulary whose words are split in a known way, got {name!r:.50}")
        return
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    whole = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = whole
