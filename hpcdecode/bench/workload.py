"""Checkpoints and prompts of benchmarks: made from a seed, kept in a work folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.folder import ENDING

BOS, EOS, PAD = 1, 2, 3
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama.

    Attributes:
        hidden: Columns of a token.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: Heads of K and V.
        mlp: Columns between a layer's second pair of matrices.
        vocabulary: Number of token ids.
        positions: Tokens that a row may have.
        tied: Whether the logits take the embedding's matrix.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    positions: int = 8192
    tied: bool = False

    @property
    def head_dim(self) -> int:
        """Return the columns of a head."""
        return self.hidden // self.heads

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of K and V of one token, all layers, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def pair_flop(self) -> int:
        """Return the FLOP of a query and a key, all heads and layers."""
        return 4 * self.hidden * self.layers

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a sequence's recurrent states."""
        return 0

    @property
    def layer_weights(self) -> int:
        """Return the elements of the matrices of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the whole model, bfloat16: layers, embedding, logits, norms."""
        norms = self.hidden * (2 * self.layers + 1)
        matrices = 1 if self.tied else 2
        return 2 * (self.layer_weights + matrices * self.vocabulary * self.hidden + norms)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of a layer's GEMMs, those of one input joined: qkv, o, gate and up, down."""
        kv, h = self.kv_heads * self.head_dim, self.hidden
        return [(h, h + 2 * kv), (h, h), (h, 2 * self.mlp), (self.mlp, h)]


SHAPES = {
    "8b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocabulary=128_256),
    "8b-4-layers": Shape(hidden=4096, layers=4, heads=32, kv_heads=8, mlp=14336, vocabulary=32_000),
    "355m": Shape(hidden=1024, layers=24, heads=16, kv_heads=4, mlp=3072, vocabulary=32_000),
    "50m": Shape(hidden=512, layers=12, heads=8, kv_heads=4, mlp=1536, vocabulary=16_000),
    "pipeline": Shape(hidden=1024, layers=6, heads=16, kv_heads=4, mlp=3072, vocabulary=1024),
    "tiny-6-layers": Shape(hidden=128, layers=6, heads=4, kv_heads=2, mlp=256, vocabulary=1024),
    "tiny": Shape(hidden=128, layers=2, heads=4, kv_heads=2, mlp=256, vocabulary=1024),
}


@dataclass(frozen=True)
class Workload:
    """Rows to generate for.

    Attributes:
        name: Of the workload, and the seed of its prompts.
        rows: Number of rows.
        shortest: Fewest prompt tokens.
        longest: Most prompt tokens.
        new: Tokens to generate for each row.
        documents: Number of texts that rows begin with, each in its turn; 0 if no two rows begin alike.
        document: Tokens of one.
    """

    name: str
    rows: int
    shortest: int
    longest: int
    new: int = 128
    documents: int = 0
    document: int = 0

    def prompts(self, shape: Shape, folder: Path | None = None) -> list[list[int]]:
        """Return random token ids.

        Args:
            shape: Of the model.
            folder: Its directory, for workloads of texts.
        """
        draw = random.Random(self.name)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.rows)]
        own = [[draw.randrange(len(_SPECIAL), shape.vocabulary) for _ in range(n)] for n in lengths]
        texts = [draw.choices(range(len(_SPECIAL), shape.vocabulary), k=self.document) for _ in range(self.documents)]
        return [texts[i % self.documents] + ids for i, ids in enumerate(own)] if texts else own

    @property
    def shared(self) -> list[int]:
        """Return the tokens of each row that a row before it begins with, too."""
        return [self.document * (row >= self.documents) for row in range(self.rows)]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("w1", 1, 64, 128),
        Workload("s32", 32, 64, 128, new=32),
        Workload("w64", 64, 64, 128),
        Workload("w128", 128, 64, 128),
        Workload("w256", 256, 64, 128),
        Workload("l32", 32, 1024, 1024),
        Workload("d24", 192, 24, 48, new=16, documents=24, document=1024),
    )
}


def default_folder() -> Path:
    """Return the folder in which checkpoints and prompts are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcdecode" / "bench"


def is_gguf(model: str) -> bool:
    """Return whether a model is a GGUF file."""
    return Path(model).suffix == ENDING and Path(model).is_file()


def llama_shape(directory: Path) -> Shape | None:
    """Return the sizes of the Llama in a directory, or None if it has another model, or other heads.

    Raises:
        UserError: If there is no config.json of one.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        if config["model_type"] != "llama":
            return None
        heads = config["num_attention_heads"]
        shape = Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            mlp=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
        )
        return shape if (config.get("head_dim") or shape.head_dim) * heads == shape.hidden else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"--model {directory}: expected the config.json of a model, got {e!r}") from e


def label(model: str) -> str:
    """Return what the files that are made for `model` are named by: the name, or that of its path and a digest."""
    path = Path(model).resolve()
    if model in SHAPES or not path.exists():
        return model
    return f"{path.name}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}"


def checkpoint(work: Path, model: str) -> Path:
    """Return the directory of a checkpoint.

    Args:
        work: Folder in which that of a name is made, once, with random bfloat16 weights and a tokenizer.
        model: A name in SHAPES, or a directory.
    """
    if model not in SHAPES:
        return Path(model)
    return made(work / f"llama-{model}", lambda folder: _write_checkpoint(folder, SHAPES[model]))


def prompt_file(work: Path, workload: Workload, model: str, prompts: Sequence[Sequence[int]]) -> Path:
    """Write a workload as JSON Lines for `hpcdecode generate`, and return the file's path.

    Args:
        work: Folder of the file.
        workload: The workload.
        model: Name of the model, or its directory.
        prompts: Token ids of the rows.
    """
    path = work / f"{workload.name}-{label(model)}.jsonl"
    lines = [json.dumps({"prompt_token_ids": ids}) for ids in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path


def made(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder`, filled by `make` unless it is there; it appears only when it is complete."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            make(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write_checkpoint(folder: Path, shape: Shape) -> None:
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    seed = torch.Generator().manual_seed(0)
    weights = {name: _draw(name, p, seed) for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    write_tokenizer(folder, shape.vocabulary)


def _draw(name: str, parameter: Tensor, seed: torch.Generator) -> Tensor:
    """Return random values: matrices at 1/sqrt(inputs), embeddings at 1, as logits of a trained model's size need."""
    if parameter.dim() == 1:
        return torch.ones(parameter.shape, dtype=torch.bfloat16)
    scale = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
    return (torch.randn(parameter.shape, generator=seed) * scale).bfloat16()


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a byte-level BPE without training: the bytes, and as many pairs of them as the vocabulary has room for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = vocabulary - len(_SPECIAL) - len(letters)
    merges = list(itertools.islice(itertools.product(letters, letters), pairs))
    tokens = [*_SPECIAL, *letters, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
