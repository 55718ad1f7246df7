"""A folder in Hugging Face format: config.json and safetensors, whole or in shards, read when asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no such file. Raises ValueError when it is there and is no JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__} where an object is expected; fetch the file again")
    return content


def quantization(config: Mapping[str, Any]) -> str | None:
    """What a config.json says its weights are quantised with: gptq, awq, fp8, bitsandbytes, …; None for plain weights."""
    settings = config.get("quantization_config") or config.get("compression_config")
    return str(settings.get("quant_method") or "unknown") if settings else None


class FolderWeights:
    """The weights of a folder by the names in its files. Raises ValueError when a file is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        index = read_json(folder / "model.safetensors.index.json").get("weight_map")
        if index is not None:
            missing = sorted({str(shard) for shard in index.values() if not (folder / shard).is_file()})
            if missing:
                raise ValueError(f"{folder}: the index names {missing[0]}, which is missing; fetch the folder again")
            self.files = tuple(folder / shard for shard in sorted(set(index.values())))
        elif (folder / "model.safetensors").is_file():
            self.files = (folder / "model.safetensors",)
        else:
            others = [path.name for path in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pth"))]
            why = f"only {others[0]}; save it as safetensors" if others else "fetch the folder again"
            raise ValueError(f"{folder}: there is no model.safetensors; {why}")

    @cached_property
    def _where(self) -> dict[str, Any]:
        """Per name the opened file that holds it."""
        where: dict[str, Any] = {}
        for path in self.files:
            try:
                file: Any = safe_open(str(path), framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: cut short or not a safetensors file ({error}); fetch it again") from error
            where |= dict.fromkeys(list(file.keys()), file)
        return where

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def nbytes(self, name: str) -> int:
        entry = self._where[name].get_slice(name)
        count = 1
        for side in entry.get_shape():
            count *= side
        return count * _SIZES.get(entry.get_dtype(), 1)

    def tensor(self, name: str) -> Tensor:
        tensor = self._where[name].get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor
