"""Check an accelerator in minutes, without a network: same tokens, the cost of wider passes, speed with a draft.

    python scripts/gpu_check.py [--device cuda] [--size 1b|tiny] [--json FILE]

The model is random, of Llama's shape: about 1 B parameters, and a draft made of its first layers. It is drawn so that its
next tokens have real margins and its late layers change little; otherwise ties and zero acceptance would say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from draftwise.drafters.base import Drafter
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.ngram import NgramDrafter
from draftwise.drafters.none import NoDrafter
from draftwise.engine.cost import measure
from draftwise.engine.engine import Engine
from draftwise.engine.governor import Governor
from draftwise.engine.passes import CostTable
from draftwise.models.linear import WeightKind
from draftwise.models.llama import LlamaModel, build
from draftwise.types import ModelConfig, Request, SamplingParams

SIZES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 32768,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 512,
    },
}
DRAFT_LAYERS = 2
ROWS = (1, 2, 4, 8, 16, 32, 64)


class RandomWeights:
    """Weights in memory under their Hugging Face names, with margins: the head's rows are the embedding's, permuted.

    A token's successor is then mostly a function of the token, as in a bigram model, and every layer adds a little.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        generator = torch.Generator(device=device).manual_seed(0)
        width, inner = config.hidden_size, config.intermediate_size
        kv = config.num_kv_heads * config.head_dim

        def matrix(rows: int, columns: int, gain: float) -> Tensor:
            return torch.randn(rows, columns, generator=generator, device=device) * (gain / columns**0.5)

        table = torch.randn(config.vocab_size, width, generator=generator, device=device)
        order = torch.randperm(config.vocab_size, generator=generator, device=device)
        self.tensors = {
            "model.embed_tokens.weight": table,
            "lm_head.weight": table[order] * (12 / width),
            "model.norm.weight": torch.ones(width, device=device),
        }
        for index in range(config.num_layers):
            name, gain = f"model.layers.{index}", 0.5 if index < DRAFT_LAYERS else 0.3
            for part, rows, columns in (
                ("self_attn.q_proj", width, width),
                ("self_attn.k_proj", kv, width),
                ("self_attn.v_proj", kv, width),
                ("self_attn.o_proj", width, width),
                ("mlp.gate_proj", inner, width),
                ("mlp.up_proj", inner, width),
                ("mlp.down_proj", width, inner),
            ):
                adds = part in ("self_attn.o_proj", "mlp.down_proj")
                self.tensors[f"{name}.{part}.weight"] = matrix(rows, columns, gain if adds else 1.0)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.tensors[f"{name}.{norm}.weight"] = torch.ones(width, device=device)

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


class Silent:
    """No text: tokens are compared."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make_config(size: str) -> ModelConfig:
    shape = SIZES[size]
    return ModelConfig(
        architecture="llama",
        head_dim=shape["hidden_size"] // shape["num_heads"],
        norm_eps=1e-5,
        max_positions=4096,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        **shape,
    )


def run(
    model: LlamaModel, drafter: Drafter, prompts: list[tuple[int, ...]], tokens: int, cost: CostTable, **params: Any
) -> dict[str, Any]:
    """Generate for all prompts one by one and then together; tokens and figures."""
    engine = Engine(
        model,
        model.new_cache(8192),
        [drafter],
        name="check",
        vocab=model.config.vocab_size,
        context=2048,
        end_tokens=(),
        decoder=lambda continues: Silent(),
        governor=Governor(cost),
        max_batch=8,
    )
    requests = [
        Request(prompt=prompt, params=SamplingParams(max_tokens=tokens, **params), draft_tokens=4) for prompt in prompts
    ]
    engine.generate(requests[:1])  # warms up
    alone = [engine.generate([request])[0] for request in requests]
    together = engine.generate(requests)
    total = sum((result.stats for result in alone[1:]), start=alone[0].stats)
    return {
        "alone": [result.tokens for result in alone],
        "together": [result.tokens for result in together],
        "tokens_per_second": total.tokens_per_second,
        "tokens_per_step": total.tokens_per_step,
        "acceptance_rate": total.acceptance_rate,
    }


def first_difference(ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> str:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return f"prompt {number}, token {place}"
    return ""


def check(size: str, device: torch.device, dtype: str, tokens: int) -> dict[str, Any]:
    kind = WeightKind({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    model = build(RandomWeights(make_config(size), device), kind, device)
    seconds = measure(model, ROWS, context=256, repeats=9)
    cost = CostTable(ROWS, seconds)
    generator = torch.Generator().manual_seed(1)
    sizes = (16, 5, 90, 33)
    prompts = [tuple(torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist()) for n in sizes]
    draft = model.subset(range(DRAFT_LAYERS))
    report: dict[str, Any] = {
        "dtype": dtype,
        "milliseconds": {str(rows): round(took * 1e3, 3) for rows, took in zip(ROWS, seconds, strict=True)},
        "rows": sorted({rule for *_, rule in model.row_report}),
        "runs": [],
    }
    for temperature in (0.0, 0.8):
        params = {"temperature": temperature, "seed": 5}
        plain = run(model, NoDrafter(), prompts, tokens, cost, **params)
        for name, drafter in (
            ("model", ModelDrafter(draft, vocab=model.config.vocab_size, context=2048, max_batch=8)),
            ("ngram", NgramDrafter()),
        ):
            drafted = run(model, drafter, prompts, tokens, cost, **params)
            difference = first_difference(drafted["alone"], plain["alone"])
            difference = difference or first_difference(drafted["together"], plain["alone"])
            report["runs"].append(
                {
                    "drafter": name,
                    "temperature": temperature,
                    "same_tokens": not difference,
                    "first_difference": difference,
                    "plain_tokens_per_second": round(plain["tokens_per_second"], 1),
                    **{key: round(drafted[key], 3) for key in ("tokens_per_second", "tokens_per_step", "acceptance_rate")},
                }
            )
    return report


def show(report: dict[str, Any]) -> None:
    print(f"\n{report['dtype']}: {'; '.join(report['rows'])}")
    print("  rows         " + "".join(f"{rows:>9}" for rows in report["milliseconds"]))
    print("  milliseconds " + "".join(f"{took:>9.3f}" for took in report["milliseconds"].values()))
    print("  drafter  temperature  same tokens     plain tok/s   tok/s  tokens/pass  acceptance")
    for row in report["runs"]:
        same = "yes" if row["same_tokens"] else f"NO: {row['first_difference']}"
        print(
            f"  {row['drafter']:<8} {row['temperature']:>11} {same:>12} {row['plain_tokens_per_second']:>15} "
            f"{row['tokens_per_second']:>7.1f} {row['tokens_per_step']:>12.2f} {row['acceptance_rate']:>11.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=sorted(SIZES), default=None, help="default: 1b on an accelerator, tiny on CPU")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    size = options.size or ("tiny" if device.type == "cpu" else "1b")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, model {size}")
    started = time.perf_counter()
    reports = []
    for dtype in ("bf16", "fp32"):
        reports.append(check(size, device, dtype, options.tokens))
        show(reports[-1])
    runs = [row for report in reports for row in report["runs"]]
    median = statistics.median(_speedup(row) for row in runs)
    print(f"\n{time.perf_counter() - started:.0f} s; median speed-up {median:.2f}")
    if options.json:
        whole = {"device": name, "size": size, "torch": torch.__version__, "reports": reports}
        options.json.write_text(json.dumps(whole, indent=1))
    if not all(row["same_tokens"] for row in runs):
        sys.exit("a drafted run gave other tokens than the plain one; see the table for where")


def _speedup(row: dict[str, Any]) -> float:
    return float(row["tokens_per_second"] / max(row["plain_tokens_per_second"], 1e-9))


if __name__ == "__main__":
    main()
