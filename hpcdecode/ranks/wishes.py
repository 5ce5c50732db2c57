"""What a job asks of its layout."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from hpcdecode.errors import UserError

LAYOUTS = ("auto", "replicas", "split")
POOLS = ("shared", "own")
ROUTES = ("fixed", "rotational")


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks of its layout.

    Attributes:
        layout: One of LAYOUTS; `auto` chooses.
        s_ranks: Number of S-ranks of the layout `split`; None chooses.
        prefill_ranks: Number of ranks that have the weights beside them, and only prefill.
        pools: Whether all R-ranks serve every group, or an even share of them each.
        tp: S-ranks that share the weights and attention heads of a stage; None chooses.
        pp: Stages of a group, each of which has a run of layers.
        route: Whether one copy of the model runs all slices of a lane (`fixed`), or all S-ranks' copies in turn
            (`rotational`).
    """

    layout: str = "auto"
    s_ranks: int | None = None
    prefill_ranks: int = 0
    pools: str = "shared"
    tp: int | None = None
    pp: int = 1
    route: str = "fixed"

    def shape(self, s_ranks: int | None = None) -> GroupShape:
        """Return the members of a group, given the number of S-ranks if all of them rotate.

        Raises:
            UserError: If a rotation of stages or of no more than one copy is asked for, or ranks that only prefill
                beside either, or if S-ranks cannot have as many of these each.
        """
        tp = self.tp or 1
        if self.prefill_ranks:
            return self._shape_with_prefill()
        if self.route == "fixed":
            return GroupShape(tp, self.pp)
        found = s_ranks or self.s_ranks or 2 * tp
        if self.pp > 1 or self.layout == "replicas" or found % tp or found < 2 * tp:
            raise UserError(
                f"--route rotational: expected the layout split, --pp 1 and {2 * tp} S-ranks or more, a multiple of "
                f"{tp}, since whole copies of the model take turns; got --layout {self.layout}, --pp {self.pp} and "
                f"{found} S-ranks; change --s-ranks, or leave --route out",
                everywhere=True,
            )
        return GroupShape(tp, 1, found // tp)

    def _shape_with_prefill(self) -> GroupShape:
        homes, count = self.s_ranks or 1, self.prefill_ranks
        flag = f"--prefill-ranks {count}"
        if self.layout == "replicas" or self.route != "fixed" or (self.tp or 1) > 1 or self.pp > 1:
            raise UserError(
                f"{flag}: expected the layout split, --route fixed, --tp 1 and --pp 1, as each of these ranks has the "
                f"whole model, got --layout {self.layout}, --route {self.route}, --tp {self.tp or 1} and --pp "
                f"{self.pp}; leave the others out",
                everywhere=True,
            )
        if count % homes:
            raise UserError(
                f"{flag}: expected a multiple of the {homes} S-ranks, which have as many each, got {count}; change "
                "one of them",
                everywhere=True,
            )
        return GroupShape(1, 1, 1 + count // homes, prefill=True)


class GroupShape(NamedTuple):
    """The members of a group: `tp` in each of `pp` stages, of each of several copies of the model.

    The copies rotate, or with `prefill` all but the first only prefill.
    """

    tp: int
    pp: int
    copies: int = 1
    prefill: bool = False

    @property
    def size(self) -> int:
        """Return the number of members."""
        return self.tp * self.pp * self.copies

    @property
    def parts(self) -> int:
        """Return the members that have a copy of the model between them."""
        return self.tp * self.pp

    @property
    def turns(self) -> int:
        """Return the copies that run the slices of a lane in turn."""
        return 1 if self.prefill else self.copies

    @property
    def flags(self) -> str:
        """Return the flags that ask for it."""
        given = [f"--{name} {value}" for name, value in (("tp", self.tp), ("pp", self.pp)) if value > 1]
        copies = "--prefill-ranks" if self.prefill else "--route rotational"
        return " ".join(given + [copies] * (self.copies > 1))

    @property
    def text(self) -> str:
        """Return it in words."""
        if self.prefill:
            return f"an S-rank and {self.copies - 1} that only prefill"
        if self.copies > 1:
            return f"{self.copies} copies in rotation" + f", of {self.tp} ranks each" * (self.tp > 1)
        stages = f"{self.pp} stages of {self.tp} ranks" if self.tp > 1 else f"{self.pp} stages"
        return stages if self.pp > 1 else f"{self.tp} ranks"
