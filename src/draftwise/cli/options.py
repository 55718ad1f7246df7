"""The options that the commands share, and what they ask of the library. Knows click; loads torch only when called."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from draftwise import LLM

Command = TypeVar("Command", bound=Callable[..., Any])
Flags = Mapping[str, Any]
"""The shared options of a command line by name, as click hands them over."""


def draft_tokens(text: str) -> int | None:
    """A number of drafted tokens a step, or None for auto: as many as pay."""
    if text != "auto" and not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a whole number from 0 (off) nor auto")
    return None if text == "auto" else int(text)


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise click.BadParameter(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def token_bias(text: str) -> tuple[int, float]:
    token, bias = pair(text)
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a token id and a number, such as 42=-100") from None


def token_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of token ids such as 11,42,7")
    return tuple(map(int, parts))


def _stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


drafter_option = click.option(
    "--drafter", default="auto", show_default=True, metavar="NAME[:PATH],…",
    help="How to draft: auto for what suits the model (--help-drafter auto of generate), none for plain decoding, model:PATH "
         "for a smaller model; several draft together.",
)

target_options = _stacked(
    click.option("--model", default="smollm2", show_default=True, metavar="MODEL",
                 help="A folder, a hub id, a .gguf file or an alias."),
    click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Convert the target's weights when loading."),
    click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Number format; default: the file's own."),
    click.option("--activations", type=click.Choice(["int8", "float"]), default="int8", show_default=True,
                 help="What quantised weights multiply: rows rounded to 8 bits, where the CPU can, or as they are."),
    click.option("--device", default="cpu", show_default=True, help="Where to run: cpu, cuda, cuda:1 …"),
    click.option("--revision", help="Branch, tag or commit of a hub id."),
    click.option("--context", type=click.IntRange(min=1), metavar="N", help="Longest prompt and output together, in tokens."),
    click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads; default: torch's choice."),
    click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template."),
)

model_options = _stacked(
    target_options,
    click.option("-o", "options", type=pair, metavar="KEY=VALUE", multiple=True,
                 help="An option of the drafter, NAME.KEY=VALUE where several have it; repeatable."),
    click.option("--draft-tokens", type=draft_tokens, metavar="N|auto", default="auto", show_default=True,
                 help="Most tokens to draft a step; auto drafts what pays, 0 nothing."),
    click.option("--verify", type=click.Choice(["match", "rejection", "block"]), default="match", show_default=True,
                 help="Verification rule; match gives the same tokens as plain decoding, seed for seed."),
    click.option("--draft-quantize", type=click.Choice(["int8", "int4"]), help="As --quantize, for a draft model."),
    click.option("--draft-dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="As --dtype, for a draft model."),
)

sampling_options = _stacked(
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest output, in tokens."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0: all."),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this probability; 1: all."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the likeliest; 0: none."),
    click.option("--repetition-penalty", type=float, default=1.0, help="Above 1 discourages tokens of prompt and output."),
    click.option("--presence-penalty", type=float, default=0.0, help="Subtracted once from tokens of the output."),
    click.option("--frequency-penalty", type=float, default=0.0, help="Subtracted for each time a token was output."),
    click.option("--logit-bias", type=token_bias, metavar="ID=VALUE", multiple=True, help="Added to a logit; repeatable."),
    click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Text never to be said; repeatable."),
    click.option("--allowed-tokens", type=token_ids, metavar="ID,ID,…", help="The only tokens that may be said."),
    click.option("--min-tokens", type=int, default=0, help="No end before this many tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the output; repeatable."),
    click.option("--stop-token", "stop_tokens", type=int, multiple=True, metavar="ID", help="Token that ends it; repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end token."),
    click.option("--logprobs", type=int, metavar="N", help="With --json: log-probabilities, and the N likeliest tokens."),
    click.option("--seed", type=int, help="The same seed gives the same output; default: a fresh one."),
)

prompts_options = _stacked(
    click.option("--prompts", "prompts_file", metavar="FILE.jsonl", help="Prompts: a line each with `prompt` or `turns`."),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="N prompts, spread evenly over the file."),
    click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded at once."),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def examples(*lines: str) -> str:
    """An epilog that shows how the command is used."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def import_library() -> None:
    """Import torch and the library. Imports lose an interrupt now and then: until they are done, it ends the process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        if handler is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        import draftwise.engine.llm  # noqa: F401
    finally:
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)


def sampling_params(flags: Flags) -> dict[str, Any]:
    """The sampling parameters as keywords, checked; the bad words, which need a tokenizer, come with `bad_words`."""
    import_library()
    from draftwise import SamplingParams

    names = (
        "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "allowed_tokens", "min_tokens", "stop", "stop_tokens", "ignore_eos", "logprobs", "seed",
    )
    params = {name: flags[name] for name in names} | {"logit_bias": dict(flags["logit_bias"])}
    SamplingParams(**params)
    return params


def bad_words(flags: Flags, llm: LLM) -> dict[str, Any]:
    """The bad words as token sequences: each at the start of a line and after a space."""
    texts = [form for word in flags["bad_words"] for form in (word, " " + word.lstrip())]
    return {"bad_words": tuple(tuple(llm.tokenizer.encode(text)) for text in dict.fromkeys(texts))} if texts else {}


def drafter_options(drafter: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The options of one or several drafters, checked. Raises ValueError, naming the choices, if one does not exist."""
    from draftwise.drafters.shipped import check_drafters

    check_drafters(drafter, dict(pairs))
    return dict(pairs)


def load(flags: Flags, *, drafter: str, options: Mapping[str, str], batch: int = 1) -> LLM:
    """The model that the flags ask for; what there is to remark while loading goes to standard error."""
    import_library()
    import draftwise

    if flags["threads"] is not None:
        import torch

        torch.set_num_threads(flags["threads"])
    return draftwise.load(
        flags["model"],
        drafter=drafter,
        options=options,
        dtype=flags["dtype"],
        quantize=flags["quantize"],
        activations=flags["activations"],
        device=flags["device"],
        revision=flags["revision"],
        max_batch=batch,
        context=flags["context"],
        notice=note,
        **{name: flags[name] for name in ("draft_tokens", "verify", "draft_quantize", "draft_dtype") if name in flags},
    )


def note(remark: str) -> None:
    click.echo(f"draftwise: {remark}", err=True)
