"""Weights of a model, or parts of them, each read from the checkpoint when it is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.gguf.experts import ExpertTensor
from hpcdecode.model.frontend.gguf.joined import JoinedTensor
from hpcdecode.model.frontend.gguf.tensors import GgufTensor
from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.joined import joined, joined_shape
from hpcdecode.model.frontend.lora_merge import MergedTensor
from hpcdecode.model.frontend.membership import WeightCut, WeightKey, WeightPart
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.plausible import check_values
from hpcdecode.model.frontend.quantization.few_bits import BLOCKS, cut_of_blocks, keeps_groups
from hpcdecode.model.frontend.quantization.plain import DequantisedTensor
from hpcdecode.model.frontend.sources import Conversion, Sources
from hpcdecode.model.frontend.stack import Pieces, Stack
from hpcdecode.model.frontend.tensors import CheckpointTensor
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.system.shared_memory import PrivateMemory, WeightMemory

TensorsOf = Callable[[int], Sequence[CheckpointTensor]]  # of an expert the tensors that make up its weight along `out`


class Weights(Mapping[WeightKey, Tensor | Stack]):
    """The weights of a model by name, and parts of them. Each is read whenever it is asked for and nobody holds it.

    A tensor on the CPU that has its dtype already is used without a copy. Of a mapped tensor only the part is read.

    Args:
        path: Model directory.
        tensors: Tensors of the checkpoint, by key.
        sources: Tensors that make up each weight.
        wanted: Shape and dtype of the weights and parts.
        device: Device for the weights.
        tables: Weights of which nothing is read until all ranks have loaded, see `readers.tables_of`.
        memory: Where those of them are put that are several tensors of the checkpoint.

    Raises:
        UserError: If weights are missing; when a weight is read, if its shape or its values cannot be right.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, CheckpointTensor],
        sources: Sources,
        wanted: Mapping[WeightKey, Meta],
        device: torch.device,
        tables: Collection[str] = (),
        memory: WeightMemory | None = None,
    ):
        self._path, self._tensors, self._sources, self._device = path, tensors, sources, device
        self._tables, self._memory = tables, memory or PrivateMemory()
        self._wanted = wanted
        self._like = {self._source(key): (about.dtype, whole_shape(key, about)) for key, about in wanted.items()}
        self._conversions = {name: c for c in sources.conversions for name in c.names}
        self._held: WeakValueDictionary[tuple[str, WeightCut | None], Tensor] = WeakValueDictionary()
        self._made: dict[str, Tensor] = {}  # by a conversion that was run for another weight
        self._check_names()
        for source, (_, shape) in self._like.items():
            if key := sources.keys.get(source):
                self._check_shape(source, tensors[key].shape, shape)
            elif keys := sources.joined.get(source):
                self._check_shape(source, joined_shape([tensors[key].shape for key in keys]), shape)

    def __iter__(self) -> Iterator[WeightKey]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, key: object) -> bool:
        return key in self._wanted

    def __getitem__(self, key: WeightKey) -> Tensor | Stack:
        if key not in self._wanted:
            raise KeyError(key)
        source, cut = self._source(key), cut_of(key)
        held = self._held.get((source, cut))
        if held is not None:
            return held
        if self._by_expert(source):
            return self._experts(key)
        weight = self._placed(source, cut)
        self._check(key, weight, self._wanted[key].shape)
        self._held[source, cut] = weight
        return weight

    def stored_as(self, key: WeightKey) -> str | None:
        """Return the key of the tensor of the checkpoint that a weight is; None if it is a part, or made of others."""
        stored = self._sources.keys.get(self._source(key))
        merged = stored is not None and isinstance(self._tensors[stored], MergedTensor)
        return stored if isinstance(key, str) and not merged else None

    def few_bits(self, key: WeightKey) -> Held:
        """Return what holds the numbers of a weight in fewer bits than activations have."""
        source, cut, columns = self._source(key), cut_of(key), len(self._wanted[key].one_token) - 1
        keys = [self._sources.keys.get(source, "")]
        if experts := self._sources.stacks.get(source):
            keys = [key for own in experts for key in own]
        tensors = [self._tensors.get(key) for key in keys]
        names = {NOT_HELD if each is None else each.few_bits() for each in tensors}
        if len(names) != 1:
            return NOT_HELD
        ((by_row, by_column),) = names
        return Held(
            by_row if by_row is not None and keeps_groups(by_row, cut, columns) else None,
            by_column if by_column is not None and keeps_groups(by_column, cut, columns - 1) else None,
        )

    def blocks(self, key: WeightKey, by_column: bool = False) -> Tensor | Stack:
        """Return the blocks of a weight whose `few_bits` are one of BLOCKS, as stored, uint8 [out, bytes].

        Args:
            key: The weight, or part.
            by_column: Whether it is [in, out].
        """
        source, held = self._source(key), self.few_bits(key)
        name = held.by_column if by_column else held.by_row
        assert name is not None, "asked only for weights in blocks"
        if self._by_expert(source):
            return self._blocks_of_experts(key, name, by_column)
        tensor, cut = self._tensors[self._sources.keys[source]], cut_of_blocks(name, cut_of(key), by_column)
        stored = self._blocks_of(key, tensor, by_column)
        return stored if cut is None else cut.of(stored)

    def _blocks_of(self, key: WeightKey, tensor: CheckpointTensor, by_column: bool) -> Tensor:
        assert isinstance(tensor, DequantisedTensor | GgufTensor | JoinedTensor), "others have no blocks"
        check_values(self._path, {name_of(key): tensor.sample()})
        return tensor.blocks(by_column) if isinstance(tensor, DequantisedTensor) else tensor.blocks()

    def _blocks_of_experts(self, key: WeightKey, name: str, by_column: bool) -> Stack:
        """Return the blocks of a part of a weight of experts, read when they are asked for; name: their type."""
        source, size = self._source(key), BLOCKS[name]
        count, *matrix = self._wanted[key].one_token
        chosen, cut = _experts_of(key, count)
        cut, read = cut_of_blocks(name, cut, by_column), self._expert_blocks(key, by_column)

        def pieces(e: int) -> Pieces:
            own = read(chosen[e])
            own = own if cut is None else cut_pieces(own, cut)
            came = (sum(map(len, own)), own[0].shape[1] // size.bytes * size.inputs)
            self._check_shape(source, came[::-1] if by_column else came, matrix)
            return own

        return Stack.read_later((count, matrix[0], matrix[1]), pieces)

    def _expert_blocks(self, key: WeightKey, by_column: bool) -> Callable[[int], Pieces]:
        """Return what gives the blocks of an expert, checked, by its number."""
        source = self._source(key)
        if (experts := self._sources.stacks.get(source)) is not None:
            return lambda e: tuple(self._blocks_of(key, self._tensors[own], by_column) for own in experts[e])
        tensor = self._tensors[self._sources.keys[source]]
        assert isinstance(tensor, DequantisedTensor | ExpertTensor), "others have no blocks"
        blocks = tensor.expert_blocks(by_column)

        def checked(e: int) -> Pieces:
            own, sample = blocks(e)
            check_values(self._path, {name_of(key): sample})
            return own

        return checked

    def _source(self, key: WeightKey) -> str:
        """Return the weight that has the tensor of a weight or part."""
        return self._sources.ties.get(name_of(key), name_of(key))

    def _by_expert(self, source: str) -> bool:
        """Return whether a weight is read an expert at a time: if each has tensors of its own, or all are computed."""
        tensor = self._tensors.get(self._sources.keys.get(source, ""))
        of_all = isinstance(tensor, DequantisedTensor | ExpertTensor | MergedTensor) and len(tensor.shape) == 3
        return source in self._sources.stacks or of_all

    def _stacked(self, source: str) -> TensorsOf | None:
        """Return what has the tensors of an expert by its number; None if experts have none of their own."""
        if (experts := self._sources.stacks.get(source)) is not None:
            return lambda e: [self._tensors[key] for key in experts[e]]
        tensor = self._tensors.get(self._sources.keys.get(source, ""))
        if not isinstance(tensor, ExpertTensor) or len(tensor.shape) != 3 or tensor.pieces is None:
            return None
        return tensor.pieces.__getitem__

    def _experts(self, key: WeightKey) -> Stack:
        """Return a part of a weight of experts. Its pieces are read, placed and checked when they are asked for."""
        source = self._source(key)
        dtype, shape = self._like[source][0], self._wanted[key].one_token
        (count, rows, columns), (chosen, cut) = shape, _experts_of(key, shape[0])
        stacked = self._stacked(source)
        read = self._matrices(source) if stacked is None else lambda e: tuple(tensor() for tensor in stacked(e))

        def pieces(e: int) -> tuple[Tensor, ...]:
            own = read(chosen[e])
            own = own if cut is None else cut_pieces(own, cut)
            placed = tuple(piece.to(device=self._device, dtype=dtype) for piece in own)
            for piece in placed:
                self._check(key, piece, piece.shape)
            self._check_shape(source, (count, sum(map(len, placed)), placed[0].shape[1]), shape)
            return placed

        return Stack.read_later((count, rows, columns), pieces, joined=stacked is None)

    def _matrices(self, source: str) -> Callable[[int], tuple[Tensor, ...]]:
        tensor = self._tensors[self._sources.keys[source]]
        assert isinstance(tensor, DequantisedTensor | ExpertTensor | MergedTensor), "others are one tensor already"
        matrix = tensor.matrices()
        return lambda e: (matrix(e),)

    def _placed(self, source: str, cut: WeightCut | None) -> Tensor:
        """Return a part of the weight `source` in its dtype on the device, without a copy if it is that already."""
        dtype, _ = self._like[source]
        weight = self._read(source)
        return (weight if cut is None else cut.of(weight)).to(device=self._device, dtype=dtype)

    def _read(self, source: str) -> Tensor:
        if key := self._sources.keys.get(source):
            return self._tensors[key]()
        if keys := self._sources.joined.get(source):
            shares = source in self._tables and source not in self._sources.ties.values()
            memory = self._memory if shares else PrivateMemory()
            return joined([self._tensors[key] for key in keys], self._like[source][0], memory)
        if source not in self._made:
            self._made.update(self._converted(self._conversions[source]))
        return self._made.pop(source)

    def _converted(self, conversion: Conversion) -> dict[str, Tensor]:
        """Return the weights of `conversion` that are wanted."""
        return {name: value for name, value in conversion.run(self._tensors).items() if name in self._like}

    def _check_names(self) -> None:
        """Raise UserError if the checkpoint lacks weights."""
        found = self._sources
        known = found.keys.keys() | found.stacks.keys() | found.joined.keys() | self._conversions.keys()
        missing = sorted(name_of(key) for key in self._wanted if self._source(key) not in known)
        if missing:
            raise UserError(
                f"{self._path} lacks {len(missing)} of {len(self._wanted)} tensors of the model, among them "
                f"{missing[0]!r}: the checkpoint is incomplete or belongs to another config.json"
            )

    def _check(self, key: WeightKey, weight: Tensor, expected: Sequence[int | str]) -> None:
        """Raise UserError if a weight that was read has another shape than expected, or values that cannot be right."""
        self._check_shape(self._source(key), weight.shape, expected)
        check_values(self._path, {name_of(key): weight})

    def _check_shape(self, source: str, came: Sequence[int], expected: Sequence[int | str]) -> None:
        """Raise UserError if the weight `source`, or a part of it, has not the shape that the model has for it."""
        if list(came) != list(expected):
            raise UserError(
                f"{self._path}: tensor {source!r} has shape {list(came)}, config.json asks for {list(expected)}: "
                "one of the two is wrong"
            )


def weight_key(trace: Trace, node: fx.Node) -> WeightKey:
    """Return what a placeholder of a trace's weights takes: a weight by its name, or a part of one."""
    name, cut = trace.weights[node], trace.cuts.get(node)
    return name if cut is None else WeightPart(name, cut)


def name_of(key: WeightKey) -> str:
    """Return the name of a weight or of that which a part is of."""
    return key.name if isinstance(key, WeightPart) else key


def cut_of(key: WeightKey) -> WeightCut | None:
    """Return what part is taken of a weight, or None for all of it."""
    return key.cut if isinstance(key, WeightPart) else None


def _experts_of(key: WeightKey, count: int) -> tuple[Sequence[int], WeightCut | None]:
    """Return the experts of a part that has `count` of them, and what it takes of their matrices."""
    cut = cut_of(key)
    if cut is None or cut.dim != 0:
        return range(count), cut and cut._replace(dim=cut.dim - 1)
    return [i for first, last in cut.ranges for i in range(first, last)], None


def whole_shape(key: WeightKey, about: Meta) -> tuple[int | str, ...]:
    """Return the shape of the whole weight, given the Meta of a part."""
    cut = cut_of(key)
    return about.shape if cut is None else cut.whole_shape(about.shape)


def cut_pieces(pieces: Sequence[Tensor], cut: WeightCut) -> tuple[Tensor, ...]:
    """Return what a cut takes of the [out_j, in] pieces of a matrix: of views where it is one range."""
    if cut.dim == 1:
        return tuple(cut.of(piece) for piece in pieces)
    starts = itertools.accumulate(map(len, pieces), initial=0)
    owns = [(piece, cut.within(first, len(piece))) for piece, first in zip(pieces, starts, strict=False)]
    return tuple(own.of(piece) for piece, own in owns if own.ranges)
