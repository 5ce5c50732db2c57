"""What an S-rank computes on CPUs besides attention: GEMMs, fused element-wise kernels, sampling, drafts."""

import enum
from collections.abc import Sequence

class Type(enum.Enum):
    """The type of numbers in memory."""

    float32 = 0

    bfloat16 = 1

    int8 = 2

    int64 = 3

class Op(enum.Enum):
    """The operation of a Step."""

    load = 0

    store = 1

    copy = 2

    neg = 3

    add = 4

    sub = 5

    mul = 6

    div = 7

    sqrt = 8

    rsqrt = 9

    reciprocal = 10

    exp = 11

    tanh = 12

    sigmoid = 13

    silu = 14

    gelu = 15

    gelu_tanh = 16

    relu = 17

    softplus = 18

    minimum = 19

    maximum = 20

    sum = 21

    peak = 22

    rotate = 23

    most = 24

    top = 25

    pick = 26

    mark = 27

    fill = 28

class Drafter:
    """What the sequences of an S-rank share that get drafts of their next tokens."""

    def __init__(self, shortest: int, longest: int, outputs: int, least: float) -> None:
        """Keep the settings.

        Args:
            shortest: Last tokens of a sequence that must have occurred before.
            longest: Last tokens that are compared at most.
            outputs: Most sequences of which others look up what they generated, the newest ones; 0: each looks up its
                own tokens alone.
            least: Chance of a guess that is ever made.

        Raises:
            ValueError: If not 1 <= shortest <= longest.
        """

class TokenHistory:
    """The tokens of one sequence, and its drafts."""

    def __init__(self, drafter: Drafter, given: Sequence[int]) -> None:
        """Begin with the tokens of a prompt.

        Args:
            drafter: Of the S-rank.
            given: Token ids, which others do not look up.
        """

    def __len__(self) -> int: ...
    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that were generated; what was guessed of them tells the chances of such guesses."""

    @property
    def expected(self) -> float:
        """Tokens of the last draft that are right, on average."""

    def draft(self, most: int, least: float, forced: Sequence[int] = []) -> list[int]:
        """Return tokens that may follow, or none.

        Args:
            most: Number of tokens, at most.
            least: The chance that all of them follow is above it.
            forced: The first of them, by a grammar, if they are as likely; or none.
        """

class Draw:
    """How the token of one row of logits is drawn."""

    def __init__(self, temperature: float, min_p: float, top_k: int, top_p: float, uniform: float) -> None:
        """Keep the sampling parameters of a row.

        Args:
            temperature: Divisor of the logits, above 0.
            min_p: Least probability relative to the largest, or 0 for all tokens.
            top_k: Number of most likely tokens, or 0 for all.
            top_p: Share of the most likely tokens, or 1 for all.
            uniform: Random number in (0, 1).
        """

def draw(
    logits: int,
    row_bytes: int,
    type: Type,
    vocabulary: int,
    rows: Sequence[int],
    draws: Sequence[Draw],
    threads: int,
    isa: str,
) -> list[int]:
    """Draw one token from some rows of logits.

    Args:
        logits: Address of the logits, [., vocabulary].
        row_bytes: Bytes from row to row.
        type: float32 or bfloat16.
        vocabulary: Number of tokens.
        rows: Index of the row of every draw.
        draws: Sampling parameters, one for each of rows.
        threads: Number of OpenMP threads.
        isa: Instruction set to use.

    Returns:
        The token ids, one for each of draws.
    """

def keep_allowed(
    logits: int, row_bytes: int, vocabulary: int, rows: Sequence[int], masks: int, words: int, threads: int
) -> None:
    """Set the logits of tokens that masks do not allow to -inf; where all others are -inf already, these become 0.

    Args:
        logits: Address of the logits, float32 [., vocabulary].
        row_bytes: Bytes from row to row.
        vocabulary: Number of tokens.
        rows: Index of the row of every mask.
        masks: Address of the masks, uint32 [len(rows), words]; bit i % 32 of word i / 32 allows token i.
        words: Words of a mask.
        threads: Number of OpenMP threads.
    """

class WeightForm(enum.Enum):
    """How packed weights hold their numbers."""

    plain = 0

    int4 = 1

    mxfp4 = 2

    fp8 = 3

    q4_1 = 4

    q8_0 = 5

    q4_k = 6

    q5_k = 7

    q6_k = 8

    nf4 = 11

    nvfp4 = 12

    i8 = 13

    q2_k = 14

    q3_k = 15

    iq4_nl = 16

    iq4_xs = 17

    mxfp8 = 18

    q5_1 = 19

    bf16 = 9

    f16 = 10

class BlockType(enum.Enum):
    """Blocks of weights in GGUF files, and our own."""

    q4_0 = 0

    q4_1 = 1

    q5_0 = 2

    q8_0 = 3

    q4_k = 4

    q5_k = 5

    q6_k = 6

    nf4 = 7

    nvfp4 = 8

    i8 = 9

    q2_k = 10

    q3_k = 11

    iq4_nl = 12

    iq4_xs = 13

    q5_1 = 14

    mxfp4 = 15

    i4 = 16

    f8 = 17

    mx4 = 18

    mx8 = 19

class Step:
    """One element-wise operation of a fused kernel."""

    def __init__(
        self,
        op: Op,
        type: Type,
        dims: Sequence[int],
        out: int,
        out_stride: Sequence[int],
        a: int,
        a_stride: Sequence[int],
        b: int | None,
        b_stride: Sequence[int],
        scalar: float,
    ) -> None:
        """Describe out[i][j][k] = op(a[i][j][k], b[i][j][k] or scalar) on float32 scratch memory.

        For a load, a is the number of a tensor and a_stride[0] its first element to read; for a store, the same of out.

        Args:
            op: Operation; sum, peak and most reduce the last of dims and multiply by scalar. top, pick and mark read
                rows of a of scalar numbers. fill puts scalar where b is not 0.
            type: Type that results are rounded to; for load and store that of the tensor.
            dims: Three sizes.
            out: First float of the result.
            out_stride: Three strides of the result, in floats.
            a: First float of the first operand.
            a_stride: Three strides of the first operand, in floats.
            b: First float of the second operand, or None for scalar.
            b_stride: Three strides of the second operand, in floats.
            scalar: Second operand if b is None.
        """

class FusedKernel:
    """A fused element-wise kernel, run token by token on values that stay in cache."""

    def __init__(self, setup: Sequence[Step], body: Sequence[Step], scratch: int, tensors: int, isa: str) -> None:
        """Check and keep the steps.

        Args:
            setup: Steps that run once a thread.
            body: Steps that run once a token.
            scratch: Floats of a thread's scratch memory.
            tensors: Number of tensors of a call.
            isa: Instruction set to use.

        Raises:
            ValueError: If a step leaves the scratch memory or the tensors, or isa is unknown.
        """

class Product:
    """A GEMM of activations by packed weights, y = x @ weight.T."""

    def __init__(
        self,
        x: Type,
        y: Type,
        words: int,
        outputs: int,
        isa: str,
        gate: Op | None = None,
        form: WeightForm = WeightForm.plain,
        rounded: bool = False,
        heads: int = 1,
        update: Product | None = None,
        adapters: int = 0,
    ) -> None:
        """Describe a GEMM.

        Args:
            x: Type of the activations, [tokens, 4 * words bytes].
            y: Type of the result, [tokens, outputs].
            words: Words of 4 bytes in a row of x.
            outputs: Rows of the weight.
            isa: Instruction set to use.
            gate: silu or gelu_tanh, or None. With a gate y has half as many outputs: of each group of 32 outputs,
                the gate of the first half times the second half.
            form: Form of the weights. But for plain, the inputs must be a multiple of 32.
            rounded: Round rows of x to int8, with a scale for 32 inputs.
            heads: With several, a row of x has `words` of each head, and a row of y `outputs` of each. Groups of 32
                outputs are of one head.
            update: GEMM of h to the same outputs, by which adapters update them before the gate (LoRA), or None.
            adapters: Number of adapters.

        Raises:
            ValueError: If the instruction set lacks these types, outputs with a gate is no multiple of 32, or the
                update does not fit.
        """

    @staticmethod
    def offered(
        x: Type, y: Type, isa: str, gate: Op | None = None, form: WeightForm = WeightForm.plain, rounded: bool = False
    ) -> bool:
        """Return True if the instruction set has GEMMs of these types and weights of this form."""

class AdapterProduct:
    """The GEMMs h = A x of adapters (LoRA), as a stage of a Chain.

    Every row is multiplied by the packed weight of its adapter; rows without one are left out.
    """

    def __init__(self, product: Product, adapters: int) -> None:
        """Describe the GEMMs.

        Args:
            product: The GEMM of one adapter.
            adapters: Number of adapters, whose packed weights follow on each other.

        Raises:
            ValueError: If there are no adapters, or product has several heads, a gate or an update.
        """

class AdapterSum:
    """The sums y + B h of adapters (LoRA), as a stage of a Chain.

    Rows without an adapter are copied.
    """

    def __init__(self, product: Product, adapters: int) -> None:
        """Describe the sums.

        Args:
            product: The GEMM B h of one adapter.
            adapters: Number of adapters, whose packed weights follow on each other.

        Raises:
            ValueError: If there are no adapters, or product has several heads, a gate or an update.
        """

class ExpertProduct:
    """GEMMs of rows by packed weights of experts.

    Every row is multiplied by the weight of the expert that was chosen for it, or by that which its token's adapter
    (LoRA) has for the expert.
    """

    def __init__(
        self, product: Product, experts: int, first: int, choices: int, shared: bool, adapters: int = 0
    ) -> None:
        """Describe the GEMMs.

        Args:
            product: The GEMM of one expert. Its update is by the experts of all adapters.
            experts: Number of experts, whose packed weights follow on each other.
            first: Number of the first of them. Rows of others become zeros.
            choices: Experts that are chosen for a token, each of which has a row of the result.
            shared: A token has one row of activations for all of them, not one for each.
            adapters: Number of adapters, each of which has weights of all experts; 0 for weights of the experts.

        Raises:
            ValueError: If there are no experts or choices, or product has several heads.
        """

class Argmax:
    """The argmax of a GEMM's outputs for every row, without most of its sums.

    An int8 GEMM bounds every output; only outputs that may be a row's largest are computed exactly.
    """

    def __init__(self, x: Type, y: Type, words: int, outputs: int, isa: str) -> None:
        """Describe the GEMM, as for Product.

        Raises:
            ValueError: If the instruction set lacks these types.
        """

    @staticmethod
    def offered(x: Type, y: Type, isa: str) -> bool:
        """Return True if the instruction set has the exact and the int8 GEMM."""

    def run(
        self,
        rows: int,
        x: tuple[int, int],
        rounded: tuple[int, int],
        about: Sequence[int],
        weight: Sequence[int],
        ids: int,
        values: int,
        threads: int,
    ) -> float:
        """Write the first of each row's largest outputs.

        Args:
            rows: Number of rows.
            x: (address, bytes from row to row) of the activations.
            rounded: The same of the activations as int8.
            about: Addresses of three float32 [rows]: scales of rounded, norms of x - rounded, norms of rounded.
            weight: Addresses of the packed weights, of the same as int8, and of their norms, float32 [groups, 2, 32].
            ids: Address of the result, int64 [rows].
            values: Address of those outputs, float32 [rows].
            threads: Number of OpenMP threads.

        Returns:
            The share of all outputs that were computed exactly.
        """

def pack_weights(
    parts: Sequence[Sequence[int]], heads: Sequence[int], words: int, in_turn: int, out: int, threads: int
) -> None:
    """Pack the rows of a weight in groups of 32 outputs.

    Args:
        parts: For every part of the weight (address, bytes from row to row, rows).
        heads: Addresses of arrays of one word per output, which groups begin with.
        words: Words of 4 bytes in a row.
        in_turn: Rows that each part gives before the next part does.
        out: Address of the result, int32 [groups, heads + words, 32], zeros so far.
        threads: Number of OpenMP threads.
    """

def pack_few_bits(
    parts: Sequence[Sequence[int]],
    type: Type,
    inputs: int,
    in_turn: int,
    bias: int,
    form: WeightForm,
    out: int,
    threads: int,
) -> None:
    """Round the numbers of a weight to few bits, and pack it in groups of 32 outputs.

    Args:
        parts: For every part of the weight (address, bytes from row to row, rows).
        type: Type of the numbers, float32 or bfloat16.
        inputs: Numbers in a row, a multiple of 32.
        in_turn: Rows that each part gives before the next part does.
        bias: Address of float32 [outputs], which groups begin with.
        form: Form of the result.
        out: Address of the result, zeros so far.
        threads: Number of OpenMP threads.
    """

def pack_blocks(
    parts: Sequence[Sequence[int]], type: BlockType, inputs: int, in_turn: int, bias: int, out: int, threads: int
) -> None:
    """Pack the rows of a weight that are blocks in groups of 32 outputs, with the same numbers.

    Args:
        parts: For every part of the weight (address, bytes from row to row, rows).
        type: Type of the blocks.
        inputs: Numbers in a row, whole blocks of them.
        in_turn: Rows that each part gives before the next part does.
        bias: Address of float32 [outputs], which groups begin with.
        out: Address of the result, zeros so far.
        threads: Number of OpenMP threads.
    """

class Attention:
    """The attention of a layer, as a stage of a Chain."""

    def __init__(self, layer: int) -> None:
        """Name the layer."""

class Chain:
    """Stages that run one after the other on a block of tokens at a time.

    What a block hands from stage to stage stays in cache.
    """

    def __init__(
        self,
        stages: Sequence[
            tuple[FusedKernel | Product | ExpertProduct | AdapterProduct | AdapterSum | Attention, Sequence[int]]
        ],
        given: int,
        passed: Sequence[tuple[int, int, int]],
    ) -> None:
        """Check and keep the stages.

        Args:
            stages: Pairs of work and the numbers of its tensors: (x, weight, y) of a GEMM, (x, weight, adapters, h, B,
                y) of one with an update, (x, experts, weight, y) of one of experts, (x, experts, weight, adapters, y)
                of one of adapters' experts, (x, experts, weight, adapters, h, B, y) of one of experts with an update,
                (adapters, x, A, h) of an AdapterProduct, (adapters, y, h, B, sum) of an AdapterSum, (qkv, out) of an
                attention, or those that the steps of a fused kernel name.
            given: Number of tensors of a call; the passed ones are numbered after them.
            passed: For every tensor that stages hand on, the bytes of its rows, where they begin in a block's memory,
                and where it begins in a row, which several tensors may share.

        Raises:
            ValueError: If stages do not fit together.
        """

    def run(
        self, tokens: int, threads: int, pointers: Sequence[int], row_bytes: Sequence[int], attention: int = 0
    ) -> None:
        """Run all stages on some tokens.

        Args:
            tokens: Number of tokens.
            threads: Number of OpenMP threads.
            pointers: Address of every given tensor.
            row_bytes: Bytes from one token's row to the next of every given tensor, 0 for a weight.
            attention: Address of the step's attention, or 0 for a chain without.
        """

    def together(self, tokens: int, threads: int) -> bool:
        """Return whether so many tokens go through as one block, as those must of which a sequence has several."""

    @property
    def tensors(self) -> int:
        """Number of tensors of a call."""

class RowCopies:
    """Copies of a few rows of matrices side by side into memory, and back."""

    def __init__(self, rows: Sequence[int], packed: int, row_bytes: int, widths: Sequence[int]) -> None:
        """Keep what is copied.

        Args:
            rows: Index of the row of every matrix, for each packed row.
            packed: Address of the packed rows.
            row_bytes: Bytes from one packed row to the next.
            widths: Bytes of a row of each matrix.
        """

    def gather(self, pointers: Sequence[int], strides: Sequence[Sequence[int]], element: int) -> bool:
        """Pack the rows of matrices.

        Args:
            pointers: Address of every matrix.
            strides: Elements from row to row and from column to column of every matrix.
            element: Bytes of an element.

        Returns:
            Whether it was done; not if the columns of a matrix do not follow each other.
        """

    def scatter(self, pointers: Sequence[int], strides: Sequence[Sequence[int]], element: int) -> bool:
        """Write the packed rows to those of matrices; takes and returns what `gather` does."""
