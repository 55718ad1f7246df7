"""draftwise chat: a conversation on the terminal, or from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from draftwise.cli import options

COMMANDS = "/reset forgets the conversation, /system TEXT sets instructions, /quit leaves"


@click.command(
    epilog=options.examples(
        "draftwise chat",
        "draftwise chat --temperature 0.7 --drafter ngram",
        "printf 'Hello!\\nAnd goodbye.\\n' | draftwise chat --max-tokens 40 --json",
    )
)
@click.option("--system", metavar="TEXT", help="Instructions that stand before the conversation.")
@options.drafter_option
@options.model_options
@options.sampling_options
@options.json_option
def command(system: str | None, drafter: str, as_json: bool, **flags: Any) -> None:
    """Talk with a model.

    A line is a turn. /reset forgets the conversation, /system TEXT sets instructions; /quit or the end of input leaves.
    Ctrl-C ends an answer, which is then forgotten.
    """
    params = options.sampling_params(flags)
    chosen = options.drafter_options(drafter, flags["options"])

    from draftwise.cli import output

    llm = options.load(flags, drafter=drafter, options=chosen)
    params |= options.bad_words(flags, llm)
    instructions = [{"role": "system", "content": system}] if system else []
    history: list[dict[str, str]] = []
    if sys.stdin.isatty():
        options.note(COMMANDS)
    for line in _lines():
        word, _, rest = line.partition(" ")
        if word == "/quit":
            break
        if word in ("/reset", "/system"):
            history = []
            instructions = [{"role": "system", "content": rest}] if word == "/system" and rest else instructions
            continue
        if word.startswith("/"):
            options.note(f"no command {word}; {COMMANDS}")
            continue
        history.append({"role": "user", "content": line})
        prompt = [*instructions, *history]
        try:
            if as_json:
                result = llm.generate(prompt, raw=flags["raw"], **params)
                output.print_json(result.as_dict())
            else:
                result = output.stream(llm.stream(prompt, raw=flags["raw"], **params))
                output.figures([result])
        except ValueError as error:  # the conversation has outgrown the context, most likely
            history.pop()
            options.note(f"error: {error}; /reset forgets the conversation")
            continue
        except KeyboardInterrupt:  # ends the answer; at the next question it leaves
            if not sys.stdin.isatty():
                raise
            history.pop()
            click.echo()
            continue
        history.append({"role": "assistant", "content": result.text})


def _lines() -> Iterator[str]:
    """Lines typed or piped in, without the empty ones, up to the end of input."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401  # gives input() a history and an editable line

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        if line:
            yield line
