"""EAGLE-3 drafts; see eagle.py, which runs both kinds."""

from __future__ import annotations

from draftwise.drafters.base import DraftSource, Target
from draftwise.drafters.eagle import Options, build_eagle
from draftwise.drafters.features import FeatureDrafter

__all__ = ["Options", "build"]


def build(options: Options, target: Target, source: DraftSource | None) -> FeatureDrafter:
    """Raises ValueError where no draft is named, or it is another algorithm's or another target's."""
    return build_eagle("eagle3", options, target, source)
