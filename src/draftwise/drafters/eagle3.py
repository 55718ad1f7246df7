"""EAGLE-3 drafts; see eagle.py, which runs both kinds."""

from __future__ import annotations

from pathlib import Path

from draftwise.drafters import eagle_layouts
from draftwise.drafters.base import DraftSource, Target
from draftwise.drafters.eagle import Options, build_eagle
from draftwise.drafters.features import FeatureDrafter

__all__ = ["Options", "build", "export"]


def build(options: Options, target: Target, source: DraftSource | None) -> FeatureDrafter:
    """Raises ValueError where no draft is named, or it is another algorithm's or another target's."""
    return build_eagle("eagle3", options, target, source)


def export(source: Path, out: Path, target: Target, *, layout: str, quantize: str | None, name: str) -> None:
    """See eagle_layouts.export."""
    eagle_layouts.export("eagle3", source, out, target, layout=layout, quantize=quantize, name=name)
