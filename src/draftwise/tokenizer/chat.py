"""Rendering of chat templates: Jinja programs that come with a model, from strangers, and therefore run in a sandbox.

Set up as the transformers library does it, so that a template gives the same text here and there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks what a model is trained on; rendering it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Callable[..., str]:
    """From a template to a function of messages and keyword variables. Raises ValueError where it cannot be parsed."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the model's chat template cannot be parsed: {error}") from error

    def render(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        try:
            return template.render(messages=_plain([_present(message) for message in messages]), **_plain(variables))
        except Exception as error:  # a template is a program, and can fail like any
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    return render


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its empty fields, which clients send as null and templates would print as None."""
    return {key: value for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """The same data as dicts, lists and scalars: the only objects that a template may touch."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"a {type(value).__name__} is no text, number, list or mapping")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
