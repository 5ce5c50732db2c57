"""Description of a job: validated, frozen, and the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hpcdecode.attention.recurrent_shapes import STATE_DTYPES
from hpcdecode.errors import UserError
from hpcdecode.ranks.wishes import LAYOUTS, POOLS, ROUTES, Wishes
from hpcdecode.requests.adapters import adapters_problem
from hpcdecode.requests.output_parser import REASONING_PARSERS, TOOL_CALL_PARSERS
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.shard import Shard
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.system.swap_tiers import TierSpec

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
R_DEVICES = (*DEVICES, "auto")
PARTITIONS = ("request", "head")
SCHEDULES = ("fixed-f", "load-control", "static", "fifo", "fluid")
ADMISSIONS = ("reserve", "optimistic")
EXCHANGES = ("auto", "collective", "messages")
QUANTISED = ("int8", "int4", "mxfp4", "mxfp8", "fp8")
WEIGHTS = ("auto", *DTYPES, *QUANTISED)
ACTIVATIONS = ("auto", "int8")
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "k8v4", "int4")
_CHOICES = {
    "reasoning_parser": REASONING_PARSERS,
    "tool_call_parser": TOOL_CALL_PARSERS,
    "dtype": DTYPES,
    "weights": WEIGHTS,
    "activations": ACTIVATIONS,
    "kv_dtype": KV_DTYPES,
    "mamba_ssm_cache_dtype": STATE_DTYPES,
    "device": DEVICES,
    "r_device": R_DEVICES,
    "partition": PARTITIONS,
    "layout": LAYOUTS,
    "pools": POOLS,
    "route": ROUTES,
    "exchange": EXCHANGES,
    "schedule": SCHEDULES,
    "admission": ADMISSIONS,
}
# Larger values need memory or time that no machine has.
_MOST = {"batch": 1 << 20, "period": 1 << 24, "lanes": 64, "prefill_tokens": 1 << 17, "overlap": 256}
STDIN = "-"  # prompts from standard input
LITERAL = "data:,"  # a prompt in place of a file: its text follows, percent-encoded (RFC 2397)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A model and how to run it. None means auto: the value is chosen before the work and printed.

    Attributes:
        model: Directory of the model, or a GGUF file.
        lora: Directory of a PEFT adapter that is merged into the weights.
        adapters: Directories of PEFT adapters that rows choose, by name; rows that choose none have the model alone.
        dtype: Data type of weights and activations.
        weights: Form of the projections' weights: `auto`, as None, for that of the checkpoint, or `dtype`.
        activations: `int8`, as which GEMMs by weights in few bits take them, or `auto`, as None, for `dtype`.
        kv_dtype: Data type of the KV cache.
        mamba_ssm_cache_dtype: Data type of recurrent states, of all kinds of layers; None for float32.
        device: Device of the S-ranks; None for `cuda` where they see a GPU.
        compile: Compile slices on GPUs with torch's compiler.
        enforce_eager: Run slices on GPUs one operator at a time, without CUDA graphs.
        gpu_mpi: Send and receive activations in the memory of GPUs, on ranks whose MPI takes it.
        r_device: Device of the R-ranks; `auto` for a GPU where one is left for the rank.
        batch: B, sequences of an S-rank that decode at once in the steady state.
        period: F, steps between injections of new rows.
        lanes: Lanes of an S-rank, each with a micro-batch in flight.
        schedule: Policy by which rows enter; `fluid` enters them as `fixed-f` does, into a KV cache larger than memory.
        admission: Enter rows when all that they may take has room (`reserve`), or what they are expected to take does.
        load_limit: W_lim of the schedule load-control, tokens that all sequences attend to in a step.
        prefill_tokens: Most prompt tokens in a step of a lane.
        max_gap: Most seconds between two tokens of a row that prompts of others should take; None or 0 for any.
        prefix_sharing: Prefill a common beginning of several prompts once.
        speculative_config: How tokens are guessed ahead, which steps confirm several of; None for one token a step.
        partition: Unit by which attention is divided among R-ranks.
        overlap: Parts of an R-rank's work in a layer, each of which is attended to when it arrives.
        layout: `replicas`, every rank has both roles; `split`, every rank has one; `auto` chooses.
        s_ranks: Number of S-ranks, of the layout `split`.
        prefill_ranks: Number of ranks that hold the weights beside them, and only prefill prompts.
        tp: S-ranks that share weights and attention heads (tensor parallelism).
        pp: Stages of S-ranks, each of which has a run of layers (pipeline parallelism).
        ep: Deal experts out whole to the S-ranks of `tp`, instead of columns of every expert (expert parallelism).
        pools: Whether all R-ranks serve every S-rank (`shared`), or an even share of them each (`own`).
        route: Whether all slices of a lane run on one S-rank (`fixed`), or on all in turn (`rotational`).
        exchange: How activations cross: by `messages` or by a `collective` a layer; `auto` times both between hosts.
        kv_memory: Bytes of the KV cache of an R-rank.
        kv_swap: Tiers, as `host:64G` or `nvme:/scratch:1T`, for rows that give up their room; for pages under `fluid`.
        gpu_memory: Most bytes of a GPU that a rank takes, KV cache included; None for the free ones.
        survive: Go on after the loss of R-ranks, with an MPI that supports it.
        skip_tokenizer_init: Do without the model's tokenizer: prompts are token ids, and results have no text.
        reasoning_parser: What splits reasoning from content in finished texts; `auto` asks the chat template.
        tool_call_parser: What finds calls of tools in them, likewise.
    """

    model: str
    lora: str | None = None
    adapters: dict[str, str] = {}
    dtype: str | None = None
    weights: str | None = None
    activations: str | None = None
    kv_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    device: str | None = None
    compile: bool = False
    enforce_eager: bool = False
    gpu_mpi: bool = True
    r_device: str = "cpu"
    batch: int | None = None
    period: int | None = None
    lanes: int | None = None
    schedule: str = "fixed-f"
    admission: str = "reserve"
    load_limit: int | None = None
    prefill_tokens: int | None = None
    max_gap: float | None = None
    prefix_sharing: bool = True
    speculative_config: SpeculativeConfig | None = None
    partition: str = "request"
    overlap: int = 1
    layout: str = "auto"
    s_ranks: int | None = None
    prefill_ranks: int = 0
    tp: int | None = None
    pp: int = 1
    ep: bool = False
    pools: str = "shared"
    route: str = "fixed"
    exchange: str = "auto"
    kv_memory: int | None = None
    kv_swap: tuple[str, ...] = ()
    gpu_memory: int | None = None
    survive: bool = False
    skip_tokenizer_init: bool = False
    reasoning_parser: str = "none"
    tool_call_parser: str = "none"

    def check(self) -> Self:
        """Return self.

        Raises:
            UserError: If a value is out of range.
        """
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in (None, *choices):
                expected = f"one of {', '.join(choices)}"
                raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {value!r}", everywhere=True)
        if self.adapters and (problem := adapters_problem(self.adapters)):
            raise UserError(f"--lora NAME=DIR: {problem}", everywhere=True)
        if self.compile and self.enforce_eager:
            raise UserError("--compile: expected it without --enforce-eager, got both; leave one out", everywhere=True)
        if self.route == "rotational" and self.exchange == "collective":
            raise UserError("--route rotational: expected --exchange messages or auto, got collective", everywhere=True)
        if self.prefill_ranks and (self.survive or self.exchange == "collective"):
            raise UserError("--prefill-ranks: expected no --survive and no --exchange collective", everywhere=True)
        if self.max_gap is not None and not 0 <= self.max_gap < float("inf"):
            raise UserError(f"--max-gap: expected seconds >= 0, got {self.max_gap}", everywhere=True)
        if self.speculative_config and self.schedule == "fluid":
            what = "expected a schedule that keeps KV caches in memory, got --schedule fluid; leave one of them out"
            raise UserError(f"--speculative-config: {what}", everywhere=True)
        if self.speculative_config and (form := self.speculative_config.quantization) not in (None, *WEIGHTS):
            what = f"quantization: expected one of {', '.join(WEIGHTS)}, got {form!r}"
            raise UserError(f"--speculative-config: {what}", everywhere=True)
        if self.skip_tokenizer_init and (self.reasoning_parser, self.tool_call_parser) != ("none", "none"):
            what = "expected no --reasoning-parser and no --tool-call-parser, which split texts; leave them out"
            raise UserError(f"--skip-tokenizer-init: {what}", everywhere=True)
        if self.swap_tiers and self.prefill_ranks:
            raise UserError("--kv-swap: expected it without --prefill-ranks, got both; leave one out", everywhere=True)
        if self.schedule == "fluid" and not self.swap_tiers:
            what = "expected --kv-swap, for what memory cannot hold, got none; add --kv-swap host:SIZE or nvme:DIR:SIZE"
            raise UserError(f"--schedule fluid: {what}", everywhere=True)
        if self.swap_tiers and not self._uses_tiers:
            expected = "expected --admission optimistic or --schedule fluid, as no row gives up its room otherwise"
            raise UserError(f"--kv-swap: {expected}, got neither; change it, or leave --kv-swap out", everywhere=True)
        asked = ("prefill_ranks",) if self.prefill_ranks else ()
        self._require_counts(*_MOST, "s_ranks", "tp", "pp", "kv_memory", "load_limit", "gpu_memory", *asked)
        return self

    @property
    def swap_tiers(self) -> list[TierSpec]:
        """Return the tiers of `kv_swap`, or raise UserError."""
        try:
            return [TierSpec.parse(text) for text in self.kv_swap]
        except ValueError as error:
            raise UserError(f"--kv-swap: {error}", everywhere=True) from None

    @property
    def _uses_tiers(self) -> bool:
        """Return whether anything moves to tiers."""
        return self.admission == "optimistic" or self.schedule == "fluid"

    @property
    def wishes(self) -> Wishes:
        """Return what is asked of the layout."""
        return Wishes(**{name: getattr(self, name) for name in Wishes.__struct_fields__})

    def _require_counts(self, *names: str) -> None:
        for name in names:
            value, most = getattr(self, name), _MOST.get(name)
            if value is not None and not 1 <= value <= (most or value):
                expected = f"in [1, {most}]" if most else ">= 1"
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag}: expected an integer {expected}, got {value}", everywhere=True)


class Job(EngineOptions, frozen=True, kw_only=True):
    """A job: options of the engine, prompts, sampling and results.

    Attributes:
        prompts: Files, patterns, or `-` for standard input.
        output: File for the results.
        params: Sampling parameters of rows that have none of their own.
        score: Score what rows give in place of generating text.
        overwrite: Replace existing results.
        prompt_column: Name of the prompts' column; None for `prompt`.
        prompt_template: Template of the prompts over the rows' columns, in jinja2's language.
        messages_template: The same of a JSON list of messages.
        system_prompt: Text of a system message before all others; implies `chat`.
        chat: Texts become messages of the user, which the model's chat template renders.
        keep_columns: Input columns in the results: names, `all` or `none`; None for those of an earlier run, or all.
        limit: Most rows to take, of all shards together.
        shard: Part of the rows; None for all of them.
        max_errors: Most rows that may be unusable; None for any number.
        profile: File of `hpcdecode calibrate`, from which layout, B, F and lanes are chosen.
        choose_schedule: Choose `schedule` from the profile, by what jobs with tiers are predicted to reach.
        trace: File for a trace of all ranks.
        checkpoint_every: Seconds between checkpoints of finished rows and of those in flight.
        stall_timeout: Seconds that a rank may make no progress; 0 for any time.
        drain_before: Seconds before the end of the batch job's time at which the job stops; 0 for never.
    """

    prompts: tuple[str, ...]
    output: str
    params: SamplingParams = SamplingParams()
    score: bool = False
    overwrite: bool = False
    prompt_column: str | None = None
    prompt_template: str | None = None
    messages_template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    keep_columns: tuple[str, ...] | None = None
    limit: int | None = None
    shard: Shard | None = None
    max_errors: int | None = None
    profile: str | None = None
    choose_schedule: bool = False
    trace: str | None = None
    checkpoint_every: float = 5.0
    stall_timeout: float = 300.0
    drain_before: float = 120.0

    def check(self) -> Self:
        """Return self.

        Raises:
            UserError: If a value is out of range.
        """
        if len(self.prompts) == 0:
            raise UserError("expected at least one prompt file, got none", everywhere=True)
        if not 0 < self.checkpoint_every < float("inf"):
            raise UserError(f"--checkpoint-every: expected seconds > 0, got {self.checkpoint_every}", everywhere=True)
        for name in ("drain_before", "stall_timeout"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UserError(f"--{name.replace('_', '-')}: expected seconds >= 0, got {value}", everywhere=True)
        made = [name for name in ("prompt_column", "prompt_template", "messages_template") if getattr(self, name)]
        if len(made) > 1:
            one, other = (f"--{name.replace('_', '-')}" for name in made[:2])
            raise UserError(f"expected one of {one} and {other}, got both", everywhere=True)
        if self.max_errors is not None and self.max_errors < 0:
            raise UserError(f"--max-errors: expected an integer >= 0, got {self.max_errors}", everywhere=True)
        if self.choose_schedule and not (self.profile and self.kv_swap):
            raise UserError("choose_schedule: expected a profile and kv_swap, got neither or one", everywhere=True)
        self._require_counts("limit")
        return super().check()

    @property
    def _uses_tiers(self) -> bool:
        """Return whether anything may move to tiers."""
        return self.choose_schedule or super()._uses_tiers
