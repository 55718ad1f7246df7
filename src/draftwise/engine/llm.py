"""A loaded model with its drafter: text in, text out. What `draftwise.load` returns; all users' paths go through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import fields
from pathlib import Path
from typing import Any, overload

import torch

from draftwise.checkpoint import Checkpoint, available_memory, cache_dir, open_checkpoint
from draftwise.drafters import find_drafter
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.shipped import check_drafters, choose_drafters
from draftwise.engine.cost import cost_table, measure
from draftwise.engine.engine import SLACK, Engine
from draftwise.engine.governor import Governor
from draftwise.engine.passes import FLAT
from draftwise.models.base import Model
from draftwise.models.load import read_model
from draftwise.tokenizer import Tokenizer, load_tokenizer
from draftwise.types import VERIFY_RULES, Event, ModelConfig, Request, Result, SamplingParams, Stats

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
"""Text (one user turn), token ids, or chat messages with `role` and `content`."""

KERNELS = ("auto", "torch")
DEFAULT_CONTEXT = 8192
"""Most tokens of a request unless asked otherwise; the model's own limit where that is less."""


def load(
    model: str,
    *,
    drafter: str = "none",
    options: Mapping[str, Any] | None = None,
    draft_tokens: int | None = None,
    verify: str = "match",
    dtype: str | None = None,
    quantize: str | None = None,
    draft_dtype: str | None = None,
    draft_quantize: str | None = None,
    activations: str = "int8",
    device: str = "cpu",
    kernels: str = "auto",
    revision: str | None = None,
    max_batch: int = 8,
    context: int | None = None,
    notice: Callable[[str], None] | None = None,
) -> LLM:
    """Load a model: a folder in Hugging Face format, a hub id, a .gguf file or an alias such as "smollm2".

    drafter: NAME or NAME:PATH, or several of them between commas, which then draft together; "auto" is "ngram", and with it
    a trained draft where one for exactly this model comes with the package. options: the drafters' own, with the drafter's
    name and a dot before one that several have. draft_tokens: nodes a step, None lets the governor choose.
    verify: "match", "rejection" or "block". dtype: "fp32", "bf16", "fp16"; quantize: "int8", "int4"; both also for the
    draft. activations: quantised weights multiply them rounded to 8 bits, "int8", where the machine has the instruction and
    numbers are bf16, or as they are, "float". kernels: "auto" uses the compiled CPU kernels where they can be had, "torch"
    never. context: most tokens of a request. notice: is told one line at a time what a user should know.
    Raises ValueError, with one line that says what to do, before any weight is read where that can be told.
    """
    check_drafters(drafter, options or {})
    if max_batch < 1:
        raise ValueError(f"max_batch is {max_batch}; it must be at least 1")
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; it must be one of: {', '.join(KERNELS)}")
    Request(prompt=(0,), verify=verify, draft_tokens=draft_tokens)
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} is not there: {str(error).splitlines()[0]}") from None
    checkpoint = open_checkpoint(model, revision=revision)
    limit = checkpoint.config.max_positions
    if context is not None and not 2 <= context <= limit:
        raise ValueError(f"context is {context}; it must lie between 2 and the model's {limit}")
    context = context or min(limit, DEFAULT_CONTEXT)
    tokenizer = load_tokenizer(checkpoint)
    compiled = kernels == "auto"
    target = read_model(
        checkpoint,
        dtype=dtype,
        quantize=quantize,
        device=place,
        cache_rows=context,
        activations=activations,
        compiled=compiled,
    )
    loaded = _Loaded(checkpoint, tokenizer, target, context, max_batch, compiled, notice or (lambda line: None))
    loaded.notice(f"{model}: {target.weights}")
    drafts = {"draft_dtype": draft_dtype, "draft_quantize": draft_quantize}
    return LLM(loaded, drafter, options or {}, draft_tokens, verify, **drafts)


class _Loaded:
    """A target and what belongs to it, shared by the drafters tried on it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        model: Model,
        context: int,
        max_batch: int,
        compiled: bool,
        notice: Callable[[str], None],
    ) -> None:
        self.compiled = compiled
        self.checkpoint, self.tokenizer, self.model = checkpoint, tokenizer, model
        self.context, self.max_batch, self.notice = context, max_batch, notice
        self.vocab = min(tokenizer.size, model.config.vocab_size)
        self.end_tokens = frozenset(model.config.eos_tokens) | tokenizer.eos_tokens

    @property
    def row_bytes(self) -> int:
        """Bytes of cache that a token takes."""
        config = self.model.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.model.dtype.itemsize

    def cache_rows(self) -> int:
        """Rows for a full batch, within a quarter of the free memory and at least one whole request."""
        one = self.context + SLACK
        free = torch.cuda.mem_get_info(self.model.device)[0] if self.model.device.type == "cuda" else available_memory()
        return one * self.max_batch if free is None else max(one, min(one * self.max_batch, free // 4 // self.row_bytes))


class LLM:
    """A target with its drafters. `using` gives the same target others."""

    def __init__(
        self,
        loaded: _Loaded,
        drafter: str,
        options: Mapping[str, Any],
        draft_tokens: int | None,
        verify: str,
        *,
        draft_dtype: str | None,
        draft_quantize: str | None,
    ) -> None:
        self._loaded = loaded
        self.draft_tokens, self.verify = draft_tokens, verify
        cache = loaded.model.new_cache(loaded.cache_rows())

        def draft_at(path: str | Path) -> DraftSource:
            return DraftSource(str(path), draft_dtype, draft_quantize, compiled=loaded.compiled)

        target = Target(
            loaded.model,
            cache,
            loaded.tokenizer,
            loaded.vocab,
            loaded.context,
            loaded.max_batch,
            loaded.notice,
            draft_at(loaded.checkpoint.path) if loaded.checkpoint.format == "safetensors" else None,
        )
        self.target = target
        """What drafters, and those who train them, are told of the model."""
        chosen = choose_drafters(drafter, options, target, draft_at)
        self.drafter = ",".join(name for name, _, _ in chosen)
        built: list[Drafter] = [
            find_drafter(name).build(own, target, draft_at(path) if path else None) for name, path, own in chosen
        ]
        cost = FLAT
        if any(drafter.max_depth for drafter in built) and draft_tokens is None:
            cost = cost_table(loaded.model, cache_dir() / "costs", fingerprint=loaded.checkpoint.fingerprint)
        self.engine = Engine(
            loaded.model,
            cache,
            built,
            name=self.drafter,
            vocab=loaded.vocab,
            context=loaded.context,
            end_tokens=loaded.end_tokens,
            decoder=lambda continues: loaded.tokenizer.decoder(continues=continues),
            governor=Governor(cost),
            max_batch=loaded.max_batch,
        )

    def using(
        self,
        drafter: str,
        *,
        options: Mapping[str, Any] | None = None,
        draft_tokens: int | None = None,
        verify: str | None = None,
        draft_dtype: str | None = None,
        draft_quantize: str | None = None,
    ) -> LLM:
        """The same target weights with other drafters, named as in `load`, and a cache of its own."""
        drafts = {"draft_dtype": draft_dtype, "draft_quantize": draft_quantize}
        return LLM(self._loaded, drafter, options or {}, draft_tokens, verify or self.verify, **drafts)

    # what was loaded

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def config(self) -> ModelConfig:
        return self._loaded.model.config

    @property
    def context(self) -> int:
        """Most tokens that a prompt and its answer may have together."""
        return self._loaded.context

    @property
    def weights(self) -> str:
        """The kinds of weight, for people."""
        return self._loaded.model.weights

    @property
    def row_bytes(self) -> int:
        """Bytes of cache that a token takes."""
        return self._loaded.row_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one row reads."""
        return self._loaded.model.weight_bytes

    @property
    def row_report(self) -> list[tuple[str, int, int, str]]:
        """Per kernel in use: name, inputs, outputs, and whether rows come out alike whatever shares their pass."""
        return list(self._loaded.model.row_report)

    def cost(self, rows: Seq[int], *, context: int = 512, repeats: int = 9) -> list[float]:
        """Median milliseconds of a target pass of n rows after `context` tokens, head included."""
        return [seconds * 1e3 for seconds in measure(self._loaded.model, rows, context=context, repeats=repeats)]

    # generating

    def request(
        self, prompt: Prompt, *, raw: bool = False, draft_tokens: int | None = None, verify: str | None = None, **params: Any
    ) -> Request:
        """A request for the engine from a prompt and sampling parameters by name. Raises ValueError on unknown ones."""
        known = {item.name for item in fields(SamplingParams)}
        for name in params:
            if name not in known:
                raise ValueError(f"unknown parameter {name!r}; there are: {', '.join(sorted(known))}")
        for name in ("stop", "stop_tokens", "allowed_tokens", "bad_words"):
            if isinstance(params.get(name), list):
                params[name] = tuple(tuple(item) if isinstance(item, list) else item for item in params[name])
        if isinstance(params.get("stop"), str):
            params["stop"] = (params["stop"],)
        tokens = tuple(self.encode(prompt, raw=raw))
        room = self.context - len(tokens)
        wanted = SamplingParams(**params)
        if room > 0 and wanted.min_tokens > room:
            raise ValueError(f"min_tokens is {wanted.min_tokens} and the context has room for {room} more tokens")
        return Request(
            prompt=tokens,
            params=wanted,
            verify=verify or self.verify,
            draft_tokens=self.draft_tokens if draft_tokens is None else draft_tokens,
            continues=isinstance(prompt, str) and (raw or not self.tokenizer.has_chat_template),
        )

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt; text becomes one user turn of the chat template unless `raw` or there is none."""
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                return self.tokenizer.encode(prompt)
            return self.tokenizer.chat([{"role": "user", "content": prompt}])
        if all(isinstance(item, int) for item in prompt):
            return [item for item in prompt if isinstance(item, int)]
        return self.tokenizer.chat([dict(item) for item in prompt if isinstance(item, Mapping)])

    @overload
    def generate(self, prompt: str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Seq[Any], **options: Any) -> Any: ...
    def generate(self, prompt: Any, **options: Any) -> Any:
        """Answer one prompt, or a list of them as one continuous batch.

        Options: raw, draft_tokens, verify, and every field of SamplingParams. Raises ValueError on bad ones, and where a
        mask or a combination of parameters leaves no token to choose.
        """
        many = isinstance(prompt, (list, tuple)) and bool(prompt) and not isinstance(prompt[0], (int, Mapping))
        results = self.engine.generate([self.request(one, **options) for one in (prompt if many else [prompt])])
        for result in results:
            if result.error is not None:
                raise ValueError(result.error)
        return results if many else results[0]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Event]:
        """Answer one prompt piece by piece; options as in `generate`. Closing the iterator cancels the request."""
        request = self.request(prompt, **options)
        return self.engine.stream(request)

    @staticmethod
    def pool(results: Seq[Result]) -> Stats:
        """The statistics of several results as ratios of sums."""
        total = Stats()
        for result in results:
            total = total + result.stats
        return total


def verify_rules() -> tuple[str, ...]:
    """The names that `verify` takes."""
    return VERIFY_RULES
