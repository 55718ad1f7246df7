"""The network of a distilled draft as it learns: layers of the Llama family between a target's embedding and head.

It is served by models/llama.py, from the same parameters under the same names. Shapes: B answers, T tokens, C width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.drafters.decoder_layer import DecoderLayer, RMSNorm
from draftwise.models.layers import Rotary
from draftwise.types import ModelConfig


class Layer(DecoderLayer):
    """A whole decoder layer, over answers side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BTC: Tensor, tables: tuple[Tensor, Tensor], seen_BTT: Tensor) -> Tensor:
        read_BTC = self.input_layernorm(x_BTC)
        k_BTKD, v_BTKD = self.keys_values(read_BTC, tables)
        q, k, v = (part.to(v_BTKD.dtype).transpose(1, 2) for part in (self.queries(read_BTC, tables), k_BTKD, v_BTKD))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_BTT[:, None], enable_gqa=True)
        return self.leave(x_BTC, attended.transpose(1, 2))


class DistilledNetwork(nn.Module):
    """Layers, final norm and a linear map to what the target's head reads.

    config: of the draft; its vocabulary is the tokens that the head knows. `d2t`: the target's ids of these, int64.
    """

    d2t: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.adapter = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.rotary = Rotary(config, torch.device("cpu"))
        self.register_buffer("d2t", torch.arange(config.vocab_size), persistent=False)

    def read(self, embedded_BTC: Tensor, starts_B: Tensor) -> Tensor:
        """Rows after the final norm, [B, T, C]. starts_B: what lies before is padding."""
        columns_T = torch.arange(embedded_BTC.shape[1], device=starts_B.device)
        positions_BT = (columns_T - starts_B[:, None]).clamp(min=0)
        cos, sin = self.rotary.tables(positions_BT.flatten(), torch.float32)
        tables = cos.view(*positions_BT.shape, 1, -1), sin.view(*positions_BT.shape, 1, -1)
        windows = self.config.windows or (None,) * self.config.num_layers
        seen = {window: _seen(columns_T, starts_B, window) for window in set(windows)}
        x_BTC = embedded_BTC
        for layer, window in zip(self.layers, windows, strict=True):
            x_BTC = layer(x_BTC, tables, seen[window])
        out: Tensor = self.norm(x_BTC)
        return out

    def forward(self, embedded_BTC: Tensor, starts_B: Tensor) -> Tensor:
        """What the target's head is to read, [B, T, C]."""
        out: Tensor = self.adapter(self.read(embedded_BTC, starts_B))
        return out


def _seen(columns_T: Tensor, starts_B: Tensor, window: int | None) -> Tensor:
    """Bool [B, T, T]: the columns that each row sees; padding sees itself, since an empty row would give NaN."""
    back_TT = columns_T[:, None] - columns_T
    near_TT = (back_TT >= 0) if window is None else (back_TT >= 0) & (back_TT < window)
    return near_TT & (columns_T >= starts_B[:, None, None]) | (back_TT == 0)
