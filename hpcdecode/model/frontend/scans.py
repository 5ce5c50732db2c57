"""Recurrent layers of transformers as recurrences in the graph, while a model is traced.

Most such layers call a function of one of a few names, behind which transformers puts a fast kernel where one is
installed. While a model is traced, these names mean operators of `recurrent`, as the forwards of `lightning` do. A
layer that keeps a state in another way is refused: it mixes tokens outside of attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.lightning import LIGHTNING
from hpcdecode.model.frontend.replaced_names import replaced_methods, replaced_names

SILU = ("silu", "swish")


@contextlib.contextmanager
def recurrences(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let the scans that the modules of `model` call be recurrences inside the block.

    Args:
        model: Model of transformers.
        dtype: Dtype of its activations, in which q, k, v and outputs are exchanged.
    """
    by_name = Scans(dtype).by_name

    def scan(_: str, function: object) -> object | None:
        return by_name.get(kernel_name(function) or "")

    with replaced_methods(model.modules(), LIGHTNING), replaced_names(model.modules(), scan):
        yield


def kernel_name(function: object) -> str | None:
    """Return the name by which transformers looks for a kernel in place of `function`, or None if it does not."""
    code = getattr(function, "__code__", None)
    if code is None or "func_name" not in code.co_freevars:
        return None
    name = function.__closure__[code.co_freevars.index("func_name")].cell_contents  # type: ignore[attr-defined]
    return name if isinstance(name, str) else None


class Scans:
    """Functions that stand in for those of transformers, with their arguments, for one sequence without a past.

    Args:
        dtype: Dtype of activations.

    Attributes:
        by_name: Function by the name of the kernel.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.by_name: dict[str, Callable[..., object]] = {
            "causal_conv1d_fn": self.convolution,
            "chunk_gated_delta_rule": self.delta_rule,
            "chunk_kda": self.delta_rule,
            "mamba_chunk_scan_combined": self.mamba2,
            "selective_scan_fn": self.mamba,
        }

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: object
    ) -> Tensor:
        """Return the causal convolution of each channel of x [1, channels, T] with its row of weight [channels, taps].

        Args:
            x: Input.
            weight: Taps of each channel, the newest token's last.
            bias: Bias [channels], or None.
            activation: What is applied to the result: SiLU, or None.
            kwargs: Refused if they would change the result.
        """
        _refuse(kwargs)
        if activation is not None and activation not in SILU:
            raise UserError(f"a convolution applies {activation!r}; expected one of {', '.join(SILU)}, or none")
        rows = x.transpose(1, 2).reshape(x.shape[-1], -1).to(self.dtype)
        y: Tensor = torch.ops.hpcdecode.causal_conv(rows, weight, bias, activation is not None)
        return y.reshape(1, x.shape[-1], -1).transpose(1, 2).to(x.dtype)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return the gated delta rule's output, [1, T, heads, v_dim].

        Args:
            query: [1, T, k_heads, k_dim].
            key: As query.
            value: [1, T, heads, v_dim].
            g: Log decay, [1, T, heads] (Gated DeltaNet) or [1, T, heads, k_dim] (Kimi's).
            beta: [1, T, heads].
            use_qk_l2norm_in_kernel: Whether query and key are divided by their norms.
            kwargs: Refused if they would change the result.
        """
        _refuse(kwargs)
        scale = query.shape[-1] ** -0.5
        flags = (value.shape[2], query.shape[2], True, use_qk_l2norm_in_kernel, scale)
        decay, factor = (x.reshape(value.shape[1], -1).float() for x in (g, beta))
        return self._recur(query, key, value, decay, factor, None, None, *flags), None

    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Tensor:
        """Return the output of Mamba-2's scan, [1, T, heads, v_dim].

        Args:
            x: [1, T, heads, v_dim].
            dt: Step of each head, [1, T, heads].
            A: Log decay per unit of dt, [heads].
            B: Keys, [1, T, groups, state].
            C: Queries, as B.
            chunk_size: Of transformers' own scan.
            D: Factor of x in the output, [heads], or None.
            z: Refused unless it is None.
            dt_bias: Added to dt, or None.
            dt_softplus: Whether softplus is applied to dt.
            dt_limit: Bounds of dt.
            kwargs: Refused if they would change the result.
        """
        _refuse({**kwargs, "z": z})
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = functional.softplus(dt) if dt_softplus else dt
        beta = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float().reshape(x.shape[1], -1)
        flags = (x.shape[2], B.shape[2], False, False, 1.0)
        return self._recur(C, B, x, None, beta, A.float(), D, *flags)

    def mamba(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Return the output of Mamba's scan, [1, channels, T]; every channel is a head of one element.

        Args:
            x: [1, channels, T].
            dt: Step of each channel, [1, channels, T].
            A: Log decay per unit of dt, [channels, state].
            B: Keys, [1, state, T].
            C: Queries, as B.
            D: Factor of x in the output, [channels], or None.
            z: The output is multiplied by SiLU of it, [1, channels, T]; or None.
            delta_bias: Added to dt, [channels], or None.
            delta_softplus: Whether softplus is applied to dt.
            kwargs: Refused if they would change the result.
        """
        _refuse(kwargs)
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = functional.softplus(dt) if delta_softplus else dt
        channels, tokens = x.shape[1:]
        q, k, v, beta = (t[0].t()[None, :, None] for t in (C, B, x, dt.float()))
        flags = (channels, 1, False, False, 1.0)
        y = self._recur(q, k, v, None, beta.reshape(tokens, channels), A.float(), D, *flags).to(x.dtype)
        y = y.reshape(tokens, channels).t()[None]
        return y if z is None else y * functional.silu(z)

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
        """Return the recurrence over q, k and v [1, T, heads, dim], in the form of v."""
        rows = (x.reshape(x.shape[1], -1).to(self.dtype) for x in (q, k, v))
        o: Tensor = torch.ops.hpcdecode.recur(*rows, *rest)
        return o.reshape(v.shape).to(v.dtype)


def _refuse(kwargs: dict[str, Any]) -> None:
    """Raise UserError if an argument would change the result of a scan that does not take it."""
    changes = {"z", "seq_idx", "cu_seqlens", "initial_state", "initial_states", "final_states_out"}
    for name in sorted(changes & set(kwargs)):
        if kwargs[name] is not None:
            raise UserError(f"a recurrent layer passes {name!r} to its scan, which the R-part does not take")
