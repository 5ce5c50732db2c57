"""The process that tries to compile a grammar: `python -m hpcdecode.sampling.grammar_process`.

A hostile grammar can end the process that compiles it, by its stack alone; then this process ends, not the job. Its
vocabulary is that of bytes, because the vocabulary does not matter here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from hpcdecode.system.confined import Answer, confine, serve

if TYPE_CHECKING:
    from llguidance import LLTokenizer

GrammarFormat: TypeAlias = Literal["grammar", "json_schema", "lark", "regex"]  # llguidance's names

SECONDS = 5  # of CPU time for one grammar
MEMORY_BYTES = 2 << 30
_STACK_BYTES = 1 << 20  # less than any thread of a job has


class _Compiler:
    """Answers requests `[format, text]` by `compiled`, or by `refused` with llguidance's words."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None

    def answer(self, request: list[str]) -> Answer:
        """Compile in a thread of its own, whose stack is small."""
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(self._compile(*request)))
        thread.start()
        thread.join()
        return answers[0] if answers else Answer("memory")

    def _compile(self, form: str, text: str) -> Answer:
        import llguidance

        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer("byte")
            confine(MEMORY_BYTES, files=True)
        try:
            state = llguidance.LLMatcher(
                self._tokenizer, llguidance.grammar_from(cast(GrammarFormat, form), text), log_level=0
            )
        except ValueError as error:
            return Answer("refused", str(error))
        return Answer("refused", state.get_error()) if state.is_error() else Answer("compiled")


def main() -> None:
    """Answer requests until there are no more."""
    threading.stack_size(_STACK_BYTES)
    serve(_Compiler().answer, SECONDS)


if __name__ == "__main__":
    main()
