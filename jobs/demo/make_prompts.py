"""Write prompts.jsonl: beginnings of paragraphs of the text that the demo model was trained on.

python jobs/demo/make_prompts.py [--out jobs/demo/prompts.jsonl]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from corpus import documents

PARAGRAPH = re.compile(r"(?:^|\n\n)(?=[A-Z])")
PROSE = re.compile(r"[A-Z][\w'\u2019\-]*( [\w'\u2019\-\"(),*]+){6}")
SAMPLED = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "top_k": 20, "seed": 3, "max_tokens": 40},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.95, "seed": 4, "max_tokens": 96},
]


def paragraphs(texts: list[str]) -> list[str]:
    """Every text from each of its paragraphs on, where that begins with prose."""
    rests = [text[match.end() :] for text in texts for match in PARAGRAPH.finditer(text)]
    return [rest for rest in rests if PROSE.match(rest)]


def beginning(text: str, characters: int) -> str:
    """At least so many characters, up to the end of a word."""
    match = re.compile(r"(?<=\w)(?=\s)").search(text, characters)
    return text[: match.start()] if match else text


def prompts(texts: list[str]) -> list[dict]:
    rng = random.Random(0)
    rests = paragraphs(texts)
    rng.shuffle(rests)
    near_end = [rest for rest in rests if 150 < len(rest) < 400]
    inner = [rest for rest in rests if 700 < len(rest) <= 3000]
    long = [rest for rest in rests if len(rest) > 3000]
    rows = [("text", beginning(rest, rng.randint(40, 240)), {}) for rest in inner[:24]]
    rows += [("end", beginning(rest, len(rest) - rng.randint(60, 110)), {}) for rest in near_end[:8]]
    rows += [("long", beginning(rest, rng.randint(800, 2600)), {"max_tokens": 48}) for rest in long[:4]]
    rows += [("sampled", beginning(rest, 90), own) for rest, own in zip(inner[24:], SAMPLED, strict=False)]
    rng.shuffle(rows)
    return [{"id": f"{kind}-{i:02}", "prompt": text, **own} for i, (kind, text, own) in enumerate(rows, start=1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    out = parser.parse_args().out
    lines = (json.dumps(row, ensure_ascii=False) for row in prompts(documents()))
    out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
