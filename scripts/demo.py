"""The main job on the default model: three prompts, greedy and sampled, decoded plainly and speculatively, side by side.

python scripts/demo.py [MODEL] [DRAFTER]      (default: smollm2 auto)
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

import draftwise as dw

PROMPTS = {
    "a question": "Why is the sky blue? Answer in a short paragraph.",
    "an edit of a given text": (
        "Correct the spelling mistakes in this text:\n\n"
        "The libary opens at nine in the morning and closes at six in the evning. Visiters may borow up to five books at a "
        "time. Books must be retuned within three weeks. Children need the permision of a parent to use the computers on "
        "the second floor. The reading room is quite, and food and drinks are not alowed there."
    ),
    "a small program": "Write a Python function that tells whether a word is a palindrome, with three examples of its use.",
}
SAMPLING = {"greedy": {}, "temperature 0.8, seed 1": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}
TOKENS = 128


def decode(llm: dw.LLM, prompt: str, params: dict[str, float]) -> tuple[dw.Result, Text]:
    """The result, and its text with the drafted and accepted tokens in green."""
    text, result = Text(), None
    for event in llm.stream(prompt, max_tokens=TOKENS, **params):
        for piece in event.pieces:
            text.append(piece.text, style="green" if piece.drafted else "")
        result = event.result or result
    assert result is not None
    return result, text


def main(model: str = "smollm2", drafter: str = "auto") -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    plain = dw.load(model, max_batch=1, context=2048, notice=console.print)
    drafting = plain.using(drafter=drafter)
    console.print(f"{model} ({plain.weights}), plain decoding beside drafter {drafting.drafter}; green: drafted and accepted\n")
    for llm in (plain, drafting):  # a first run warms kernels and caches
        decode(llm, "Count from one to ten.", {})
    heads = ("prompt", "decoding", "plain", "speculative", "speed-up", "tokens a pass", "texts")
    summary = Table(*heads, box=None, pad_edge=False)
    same = True
    for kind, prompt in PROMPTS.items():
        for name, params in SAMPLING.items():
            slow, before = decode(plain, prompt, params)
            fast, after = decode(drafting, prompt, params)
            same = same and slow.tokens == fast.tokens
            pages = Table(expand=True)
            pages.add_column(f"{kind}, {name}: plain", ratio=1)
            pages.add_column("speculative", ratio=1)
            pages.add_row(before, after)
            console.print(pages)
            summary.add_row(
                kind,
                name,
                f"{slow.stats.tokens_per_second:.0f} tokens/s",
                f"{fast.stats.tokens_per_second:.0f} tokens/s",
                f"{fast.stats.tokens_per_second / slow.stats.tokens_per_second:.2f}×",
                f"{fast.stats.tokens_per_step:.2f}",
                "identical" if slow.tokens == fast.tokens else "DIFFERENT",
            )
    console.print("", summary, "")
    console.print("All texts are identical, token for token." if same else "Some texts differ.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
