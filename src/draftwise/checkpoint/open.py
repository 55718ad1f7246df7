"""From what a user names (a folder, a GGUF file, a hub id, an alias) to one kind of checkpoint.

Everything that can be wrong with the files is found here, before any weight is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from draftwise.checkpoint import hub
from draftwise.checkpoint.blocks import Quantized
from draftwise.checkpoint.config import from_huggingface
from draftwise.checkpoint.folder import FolderWeights, quantization, read_json
from draftwise.checkpoint.gguf_file import GGUFFile, read_gguf
from draftwise.checkpoint.gguf_model import GGUFWeights, gguf_config
from draftwise.checkpoint.names import LLAMA_LIKE, parameters
from draftwise.types import ModelConfig


class Weights(Protocol):
    """Named tensors of some container, none of them in memory until asked for."""

    def names(self) -> frozenset[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def nbytes(self, name: str) -> int: ...
    def tensor(self, name: str) -> Tensor | Quantized: ...


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model: its config now, its weights by Hugging Face name when asked for.

    path: the folder or the (first) GGUF file. fingerprint: changes with any weight file's place, size or time, so that
    what is derived from the weights can be kept. quantization: the method whose output a folder's weights are (gptq, awq,
    fp8, bitsandbytes, …), None for plain numbers and for GGUF. gguf: the parsed file, for its tokenizer.
    """

    source: str
    path: Path
    config: ModelConfig
    format: Literal["safetensors", "gguf"]
    fingerprint: str
    weights: Weights = field(repr=False)
    quantization: str | None = None
    gguf: GGUFFile | None = field(default=None, repr=False)

    def names(self) -> frozenset[str]:
        """The parameters there are, such as "model.layers.0.self_attn.q_proj.weight", for both formats."""
        return self.weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def nbytes(self, name: str) -> int:
        """Bytes in the file."""
        return self.weights.nbytes(name)

    def tensor(self, name: str) -> Tensor | Quantized:
        """A parameter as stored: floats in the file's own type and mapped, blocks taken apart. Treat it as read-only.

        Raises ValueError for a name that is not there.
        """
        if name not in self.weights.names():
            raise ValueError(f"{self.path}: there is no parameter {name}; the file is incomplete or of another architecture")
        return self.weights.tensor(name)


def open_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a folder in Hugging Face format, a .gguf file (any part of a split one), a hub id or an alias.

    A hub id or alias that is not in the local cache yet is fetched; `revision` picks a branch, tag or commit on the hub.
    Raises ValueError, with one line that says what to do, for whatever is missing, damaged or not supported.
    """
    path = Path(source).expanduser()
    if not path.exists():
        path = _fetched(str(source), revision)
    elif revision is not None:
        raise ValueError(f"{source}: a local path has no revision {revision!r}; leave it out, or give a hub id")
    return _open_folder(str(source), path) if path.is_dir() else _open_gguf(str(source), path)


def _fetched(source: str, revision: str | None) -> Path:
    """The local copy of a hub id or alias; the network is asked only when it is missing or incomplete."""
    path = hub.cached(source, revision=revision)
    if path is not None and path.is_dir():
        try:
            FolderWeights(path)
        except ValueError:
            path = None
    return hub.pull(source, revision=revision) if path is None else path


def _open_folder(source: str, folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        hint = f"give the file itself: {files[0]}" if files else "give a folder in Hugging Face format or a .gguf file"
        raise ValueError(f"{folder}: there is no config.json; {hint}")
    raw = read_json(folder / "config.json")
    try:
        config = from_huggingface(raw, read_json(folder / "generation_config.json"))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    weights = FolderWeights(folder)
    checkpoint = Checkpoint(
        source=source,
        path=folder,
        config=config,
        format="safetensors",
        fingerprint=_fingerprint([folder / "config.json", *weights.files]),
        weights=weights,
        quantization=quantization(raw),
    )
    if checkpoint.quantization is None:
        _check_complete(checkpoint)
    return checkpoint


def _open_gguf(source: str, path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = gguf_config(file)
    checkpoint = Checkpoint(
        source=source,
        path=file.path,
        config=config,
        format="gguf",
        fingerprint=_fingerprint(file.parts),
        weights=GGUFWeights(file, config),
        gguf=file,
    )
    _check_complete(checkpoint)
    return checkpoint


def _check_complete(checkpoint: Checkpoint) -> None:
    """Every parameter is there and has the shape that the config promises."""
    names = checkpoint.names()
    if checkpoint.config.architecture not in LLAMA_LIKE:
        return
    for name, shape in parameters(checkpoint.config).items():
        if name not in names:
            raise ValueError(f"{checkpoint.path}: {name} is missing; the file is incomplete, fetch it again")
        if checkpoint.shape(name) != shape:
            raise ValueError(f"{checkpoint.path}: {name} is {checkpoint.shape(name)} where the config promises {shape}")


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]
