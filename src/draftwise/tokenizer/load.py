"""Finding a checkpoint's tokenizer and everything said about it: its special tokens, end tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from draftwise.checkpoint import Checkpoint
from draftwise.checkpoint.folder import read_json
from draftwise.tokenizer.gguf import gguf_backend
from draftwise.tokenizer.tokenizer import Tokenizer

# What ends a turn or a text in the chat formats in use. A name counts only where it is a special token.
_END_NAMES = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|endoftext|> <|end_of_text|> <end_of_turn> "
    "<end_of_utterance> </s> <EOT> <｜end▁of▁sentence｜>"
).split()


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: out of its GGUF file, or of its folder's tokenizer files.

    Raises ValueError where there is none or it cannot be read.
    """
    if checkpoint.gguf is not None:
        return _from_gguf(checkpoint, checkpoint.gguf.metadata)
    return _from_folder(checkpoint, checkpoint.path)


def _from_gguf(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> Tokenizer:
    backend = gguf_backend(metadata, checkpoint.path)
    names = {}
    eos = set(checkpoint.config.eos_tokens)
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        text = None if id is None else backend.id_to_token(int(id))
        if id is not None and text is not None:
            names[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = text
            if name in ("eot", "eom"):
                eos.add(int(id))
    ends = _special_ids(backend, _END_NAMES)
    return Tokenizer(backend, eos_tokens=eos | ends, names=names, chat_template=metadata.get("tokenizer.chat_template"))


def _from_folder(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{folder / 'tokenizer.json'}: cannot be read ({error}); fetch it again") from error
    else:
        backend = _converted(folder)
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(name)
        if value is not None:
            names[name] = str(value["content"] if isinstance(value, dict) else value)
    backend.no_truncation()  # limits of somebody's training run
    backend.no_padding()
    template = _folder_template(folder, settings.get("chat_template"))
    eos = set(checkpoint.config.eos_tokens)
    if "eos_token" in names:
        eos |= _ids(backend, [names["eos_token"]])
    if template is not None:  # a turn's end in the template ends a turn, even where the configuration forgets it
        eos |= _special_ids(backend, [name for name in _END_NAMES if name in template])
    return Tokenizer(backend, eos_tokens=eos, names=names, chat_template=template)


def _converted(folder: Path) -> Backend:
    """A tokenizer in an older format (a SentencePiece model, vocab.json and merges.txt), by the transformers library."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as error:  # of many types
        why = " ".join(str(error).split())
        raise ValueError(f"{folder}: there is no tokenizer that can be read ({why}); add its tokenizer.json") from error
    assert isinstance(backend, Backend)
    return backend


def _folder_template(folder: Path, setting: Any) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    setting = setting or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(setting, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in setting}
        setting = by_name.get("default")
    return None if setting is None else str(setting)


def _ids(backend: Backend, texts: Iterable[str]) -> set[int]:
    return {id for id in map(backend.token_to_id, texts) if id is not None}


def _special_ids(backend: Backend, texts: Iterable[str]) -> set[int]:
    special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    return _ids(backend, texts) & special
