"""The flags of sampling, and those of them that `hpcdecode score` has, too."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.cli.arguments import parsed
from hpcdecode.requests.params import SamplingParams

if TYPE_CHECKING:
    from hpcdecode.cli.arguments import Group

_DEFAULTS = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}
_Switch = argparse.BooleanOptionalAction  # --no-... overrides a job file


def add_sampling(group: Group) -> None:
    """Add all flags of sampling."""
    add, default = group.add_argument, _DEFAULTS
    help = (
        "auto takes temperature, top_k, top_p, min_p and repetition_penalty from generation_config.json of the model "
    )
    help += "and says so; flags and rows win. model, the default, takes end-of-sequence tokens alone, so that rows are "
    help += "greedy unless the command says otherwise"
    add("--generation-config", type=parsed(parse_generation_config), metavar="{auto,model}", help=help)
    add("--n", type=int, metavar="N", help=f"number of samples of every row ({default['n']})")
    add("--max-tokens", type=int, metavar="N", help=f"most tokens to generate ({default['max_tokens']})")
    help = f"tokens to generate before anything may end the text ({default['min_tokens']})"
    add("--min-tokens", type=int, metavar="N", help=help)
    add("--temperature", type=float, metavar="T", help=f"temperature; 0 is greedy ({default['temperature']})")
    help = f"sample from the K most likely tokens; 0 for all of them ({default['top_k']})"
    add("--top-k", type=int, metavar="K", help=help)
    help = f"sample from the most likely tokens whose probabilities add up to P ({default['top_p']})"
    add("--top-p", type=float, metavar="P", help=help)
    help = f"drop tokens less likely than P times the most likely one ({default['min_p']})"
    add("--min-p", type=float, metavar="P", help=help)
    for name, what in (
        ("presence", "lower the logits of generated tokens by X"),
        ("frequency", "lower the logits of tokens by X for each time they were generated"),
        ("repetition", "divide the logits of generated and prompt tokens by X, or multiply if negative"),
    ):
        add(f"--{name}-penalty", type=float, metavar="X", help=f"{what} ({default[f'{name}_penalty']})")
    add("--logit-bias", type=parsed(_biases), metavar="ID:X[,ID:X...]", help="add X to the logit of the token ID")
    add("--bad-words", action="append", metavar="TEXT", help="never generate this text; may be given several times")
    add("--seed", type=int, metavar="S", help=f"seed of the random numbers ({default['seed']})")
    add("--ignore-eos", action=_Switch, help="continue after end-of-sequence tokens")
    add("--stop-token-ids", type=parsed(_ids), metavar="ID[,ID...]", help="end the text at these tokens")
    add("--stop", action="append", metavar="TEXT", help="end the text at this string; may be given several times")
    add("--include-stop-str-in-output", action=_Switch, help="keep the stop string in the text")
    add("--skip-special-tokens", action=_Switch, help="leave special tokens out of the text (default: yes)")
    help = "constrain the text: a JSON object with json, regex, choice or grammar, or a file that holds one"
    add("--structured-outputs", type=parsed(_object), metavar="JSON", help=help)
    help = "search for the W most likely continuations, which become the row's samples"
    add("--beam-width", type=int, metavar="W", help=help)
    help = f"exponent of the length by which a beam's score is divided ({default['length_penalty']})"
    add("--length-penalty", type=float, metavar="X", help=help)
    add_given_tokens(group)
    help = "record the same for the tokens of the prompt"
    add("--prompt-logprobs", type=int, metavar="K", help=help)


def add_given_tokens(group: Group) -> None:
    """Add the flags that say what is kept of a prompt, and of log-probabilities."""
    add = group.add_argument
    help = "keep only the last N tokens of a prompt; -1 for as many as the context can hold"
    add("--truncate-prompt-tokens", type=int, metavar="N", help=help)
    help = "record the log-probability of every token, and those of the K most likely ones"
    add("--logprobs", type=int, metavar="K", help=help)


def parse_generation_config(text: str) -> str:
    """Return the text, or raise ValueError if it is neither `auto` nor `model`."""
    if text not in ("auto", "model"):
        raise ValueError(f"expected auto or model, got {text!r}")
    return text


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"expected token ids with commas between them, such as 2,13, got {text!r}") from None


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise ValueError(f"expected ID:X with commas between them, such as 42:-1.5,7:2, got {text!r}") from None


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object from its text or from a file."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a JSON object or a file of one: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {value!r}")
    return value
