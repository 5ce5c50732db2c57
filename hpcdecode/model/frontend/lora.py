"""What a LoRA adapter adds to the weights of a model: scale * B A.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021); Kalajdzievski, "A Rank Stabilization
Scaling Factor for Fine-Tuning with LoRA" (2023), for rsLoRA; Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation"
(2024), section 4, for magnitudes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from hpcdecode.model.frontend.lora_files import FLOATS, WRAPPED, AdapterFile, refused
from hpcdecode.model.frontend.tensors import StoredTensor

SWAPPED_SINCE = (0, 19)  # PEFT; before, A of experts' weights [E, out, in] had `out` columns


class TargetWeight(NamedTuple):
    """A weight of a model that adapters may update.

    Attributes:
        shape: Its shape.
        turned: Whether it is stored as [in, out], or [E, in, out].
    """

    shape: tuple[int, ...]
    turned: bool


class LoraUpdate(NamedTuple):
    """What an adapter adds to a weight, or to those of all experts of a layer.

    Attributes:
        module: Name of the module, or of its parameter.
        a: A, [rank, in]. Of experts [experts * rank, in], one below the other.
        b: B, [out, rank]. Of experts [out, rank * experts], the columns of all experts in turn.
        scale: What B A is multiplied by.
        magnitude: Norm that every row [in] of the updated weight gets, [out] (DoRA), or None.
        experts: Number of experts, or None for one matrix.
        swapped: Whether A and B of experts stand in each other's place, transposed.
    """

    module: str
    a: StoredTensor
    b: StoredTensor
    scale: float
    magnitude: StoredTensor | None = None
    experts: int | None = None
    swapped: bool = False

    @property
    def rank(self) -> int:
        """Return the rank of what is added to one matrix."""
        return self.a.shape[0] // (self.experts or 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Return [out, in] of what is added to one matrix."""
        sizes = self.b.shape[0], self.a.shape[1]
        return (sizes[1], sizes[0]) if self.swapped else sizes

    def factor_a(self, e: int = 0) -> Tensor:
        """Return A in float32, [rank, in], of one expert where there are several."""
        return (self._b(e).t() if self.swapped else self._a(e)).float()

    def factor_b(self, e: int = 0) -> Tensor:
        """Return B times the scale in float32, [out, rank], of one expert where there are several."""
        return (self._a(e).t() if self.swapped else self._b(e)).float() * self.scale

    def _a(self, e: int) -> Tensor:
        return self.a() if self.experts is None else self.a()[e * self.rank : (e + 1) * self.rank]

    def _b(self, e: int) -> Tensor:
        return self.b() if self.experts is None else self.b()[:, e :: self.experts]


def updates_of(adapter: AdapterFile, weights: Mapping[str, TargetWeight]) -> dict[str, LoraUpdate]:
    """Return what an adapter adds to weights, by the names of weights of the model, or of tensors of a checkpoint.

    Args:
        adapter: The adapter.
        weights: Weights of the model by name, those of a module in the order in which it has them.

    Raises:
        UserError: If the adapter is damaged, or of another model.
    """
    found = {}
    for module, parts in adapter.parts.items():
        own = module.replace(WRAPPED, "")
        names = _targeted(adapter, own, weights)
        if not names:
            if own != module:
                known = any(name.startswith(f"{own}.") for name in weights)
                expected = "one update a module" if known else "weights of the model, which has no such module"
                raise refused(adapter.folder, f"{expected}, got {module!r:.200}")
            found[f"{module}.weight"] = _update(adapter, module, parts)
            continue
        place = len(names) - 1 - module.count(WRAPPED)  # what updates the last one is around the others
        if place < 0 or own + WRAPPED * (len(names) - 1) not in adapter.parts or own not in adapter.parts:
            raise refused(adapter.folder, f"updates of {', '.join(names)}, got another number of them")
        found[names[place]] = _update(adapter, names[place], parts, weights[names[place]])
    return found


def _targeted(adapter: AdapterFile, module: str, weights: Mapping[str, TargetWeight]) -> Sequence[str]:
    """Return the parameters of a module that an adapter updates as such (PEFT's target_parameters), in their order."""
    targets = adapter.stated.get("target_parameters") or ()
    own = (name for name in weights if name.rpartition(".")[0] == module)
    return [name for name in own if any(name == target or name.endswith(f".{target}") for target in targets)]


def _update(
    adapter: AdapterFile, module: str, parts: Mapping[str, StoredTensor], weight: TargetWeight | None = None
) -> LoraUpdate:
    """Return an update of its tensors; weight: the parameter that it is of, if the adapter names parameters."""
    if not {"A", "B"} <= parts.keys():
        raise refused(adapter.folder, f"lora_A and lora_B of {module!r:.200}, got lora_{'+'.join(parts)} alone")
    a, b, magnitude = parts["A"], parts["B"], parts.get("magnitude_vector")
    if (magnitude is not None) != bool(adapter.stated.get("use_dora")):
        raise refused(adapter.folder, f"lora_magnitude_vector with use_dora alone, got {module!r:.200} otherwise")
    experts = weight.shape[0] if weight is not None and len(weight.shape) == 3 else None
    scale, rank = adapter.scale(module), adapter.rank(module) * (experts or 1)
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank
    if not fits or a.dtype not in FLOATS or b.dtype not in FLOATS:
        raise refused(
            adapter.folder,
            f"{module!r:.200} with A [{rank}, in] and B [out, {rank}] of floating point, got {a.dtype} "
            f"{list(a.shape)} and {b.dtype} {list(b.shape)}",
        )
    if magnitude is not None and (magnitude.dtype not in FLOATS or magnitude.shape != (b.shape[0],)):
        raise refused(
            adapter.folder,
            f"{module!r:.200} with magnitudes [{b.shape[0]}] of floating point, got {magnitude.dtype} "
            f"{list(magnitude.shape)}",
        )
    made = LoraUpdate(module, a, b, scale, magnitude, experts)
    return made if weight is None or experts is None else made._replace(swapped=_is_swapped(adapter, made, weight))


def _is_swapped(adapter: AdapterFile, update: LoraUpdate, weight: TargetWeight) -> bool:
    """Return whether A and B of experts stand in each other's place, as in adapters of earlier versions of PEFT."""
    _, outputs, inputs = weight.shape
    if weight.turned:
        return False
    if outputs != inputs:
        return update.shape == (inputs, outputs)
    stated = re.match(r"(\d{1,9})\.(\d{1,9})", str(adapter.stated.get("peft_version", "")))
    return stated is None or (int(stated[1]), int(stated[2])) < SWAPPED_SINCE
