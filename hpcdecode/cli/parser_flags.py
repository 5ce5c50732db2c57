"""The flags that split texts into reasoning, content and calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcdecode.requests.output_parser import REASONING_PARSERS, TOOL_CALL_PARSERS

if TYPE_CHECKING:
    from hpcdecode.cli.arguments import Group


def add_parsers(group: Group, *, budget: bool = True) -> None:
    """Add `--reasoning-parser` and `--tool-call-parser`, with vLLM's names, and the budget of reasoning."""
    help = "split reasoning from content: by the markers of this form, auto for that of the model's chat template "
    group.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help=help + "(none)")
    help = "find calls of tools in this form, likewise; a text is kept whole in any case (none)"
    group.add_argument("--tool-call-parser", choices=TOOL_CALL_PARSERS, help=help)
    if not budget:
        return
    help = "end the reasoning after N tokens; needs --reasoning-parser; rows may have a budget of their own"
    group.add_argument("--thinking-token-budget", type=int, metavar="N", help=help)
