"""Distilled drafts: some of the target's layers learn to say what all of them say.

A linear map, found by least squares before training, takes the draft's last hidden state to the target's, as a tuned lens
does, so that learning begins from what the chosen layers know already.
Sources: DistillSpec, Zhou et al. 2023, arXiv 2310.08461; the tuned lens, Belrose et al. 2023, arXiv 2303.08112. Shapes: B
answers, T tokens, P rows that learn, C width, V tokens that the draft knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.checkpoint.names import LLAMA_LIKE
from draftwise.drafters.base import Target
from draftwise.drafters.distilled_files import write_distilled
from draftwise.drafters.distilled_network import DistilledNetwork
from draftwise.models.layers import Rotary
from draftwise.train.batches import spread
from draftwise.train.capture import Captured, capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.train.lesson import DIVERGENCES, Lesson, distributions, match
from draftwise.train.ridge import Ridge
from draftwise.train.rows import frequent_tokens

SAMPLE = 128
"""Answers that the lens is fitted on."""
AT_ONCE = 8
"""Of those, what one pass takes."""
RIDGE = 0.001
"""Weight of keeping the lens small, against the mean square of what it reads."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of distilled drafts."""

    layers: str = field(
        default="3", metadata={"help": "layers of the target to begin with: numbers such as 0,15,29, or how many of the first"}
    )
    vocab: int = field(default=16384, metadata={"help": "tokens that the draft knows: the most frequent ones"})
    inner: int = field(default=0, metadata={"help": "width of a new feed-forward in each layer; 0: the target's own"})
    loss: str = field(default="forward", metadata={"help": "divergence to lessen: forward (KL), reverse (KL) or tv"})
    feature_weight: float = field(default=2.0, metadata={"help": "weight of meeting the target's final hidden state"})
    prompt_weight: float = field(default=0.5, metadata={"help": "weight of a prompt's tokens against an answer's"})

    def __post_init__(self) -> None:
        if self.vocab < 1:
            raise ValueError(f"vocab is {self.vocab}; it must be at least 1")
        for name in ("inner", "feature_weight", "prompt_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.loss not in DIVERGENCES:
            raise ValueError(f"loss is {self.loss!r}; it must be one of: {', '.join(DIVERGENCES)}")


class DraftLesson(Lesson):
    """Trains a draft. tokens_V: what it knows, as the target's ids; its head is the target's rows of those."""

    taps = ("final_norm",)
    drafter = "draft"
    tokens_V: Tensor
    final_scale: Tensor
    head_VC: Tensor

    def __init__(self, network: DistilledNetwork, target: Target, options: Options) -> None:
        super().__init__()
        self.network, self.target, self.options = network, target, options
        network.rotary = Rotary(network.config, target.model.device)
        self.register_buffer("tokens_V", network.d2t.clone())
        self.register_buffer("final_scale", torch.ones(()))
        self.register_buffer("head_VC", target.model.head_rows(self.tokens_V.to(target.model.device)).clone(), persistent=False)

    def forward(self, batch: Captured) -> dict[str, Tensor]:
        answers_BT = learning(batch)
        said_BTC = self.network(*self.inputs(batch))
        loss, accepted, count = self._missed(batch, said_BTC, answers_BT)
        figures = {"accepted_1": accepted / max(count, 1)}
        weight = self.options.prompt_weight
        if weight:  # what the target would say inside a prompt teaches as much, and its rows are there
            prompts_BT = ~answers_BT & (torch.arange(answers_BT.shape[1], device=answers_BT.device) >= batch.starts_B[:, None])
            lost, _, more = self._missed(batch, said_BTC, prompts_BT)
            loss, count = loss + weight * lost, count + weight * more
        return {"loss": loss / max(count, 1), **figures}

    def _missed(self, batch: Captured, said_BTC: Tensor, learns_BT: Tensor) -> tuple[Tensor, Tensor, float]:
        """Sums over the learning rows of the loss and of the chance to be accepted, and how many they are."""
        final_PC, said_PC = batch.features["final_norm"][learns_BT], said_BTC[learns_BT].float()
        p_PV = distributions(final_PC, self.head_VC, self.precision)
        places_P = torch.arange(len(p_PV), device=p_PV.device)
        loss, accepted = match(said_PC, self.served(self.head_VC), p_PV, places_P, kind=self.options.loss)
        if self.options.feature_weight:
            missed = F.smooth_l1_loss(said_PC / self.final_scale, final_PC.float() / self.final_scale, reduction="none")
            loss = loss + self.options.feature_weight * missed.mean(-1).sum()
        return loss, accepted, len(p_PV)

    def inputs(self, batch: Captured) -> tuple[Tensor, Tensor]:
        """What the network reads: every token but the last, embedded, [B, T - 1, C], and where each text starts."""
        tokens_BT = batch.tokens_BT[:, :-1]
        embedded = self.target.model.embed(tokens_BT.reshape(-1)).view(*tokens_BT.shape, -1)
        return embedded.float(), batch.starts_B

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.head_VC.copy_(self.target.model.head_rows(self.tokens_V))

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        self.network.d2t = self.tokens_V
        write_distilled(folder, self.network, self.target, card)


def learning(batch: Captured) -> Tensor:
    """The rows whose next token is an answer's, bool [B, T - 1]."""
    rows = batch.tokens_BT.shape[1] - 1
    return torch.arange(rows, device=batch.answers_B.device) >= rows - batch.answers_B[:, None]


def build(options: Options, target: Target, corpus: Corpus) -> DraftLesson:
    """A draft that has learnt nothing but its lens. Raises ValueError where the target has no layers to begin with."""
    shape = target.model.config
    if shape.architecture not in LLAMA_LIKE:
        raise ValueError(
            f"a distilled draft is made of layers of the Llama family ({', '.join(LLAMA_LIKE)}), and {shape.architecture} "
            "models have others; train eagle3 instead"
        )
    chosen = parse_layers(options.layers, shape.num_layers)
    tokens_V = frequent_tokens(target, corpus, options.vocab)
    config = replace(
        shape,
        vocab_size=len(tokens_V),
        num_layers=len(chosen),
        windows=tuple(shape.windows[layer] for layer in chosen) if shape.windows else (),
        intermediate_size=options.inner or shape.intermediate_size,
        tie_embeddings=False,
        raw={},
    )
    network = DistilledNetwork(config)
    network.d2t = tokens_V
    begin(network, chosen, target)
    lesson = DraftLesson(network, target, options).to(target.model.device)
    fit_lens(lesson, spread(corpus.answers, SAMPLE))
    return lesson


def parse_layers(text: str, layers: int) -> tuple[int, ...]:
    """The layers that a user named: their numbers, or how many of the first."""
    names = [name.strip() for name in text.split(",")]
    if all(name.isdecimal() for name in names):
        chosen = tuple(map(int, names)) if len(names) > 1 else tuple(range(int(names[0])))
        if chosen and max(chosen) < layers and list(chosen) == sorted(set(chosen)):
            return chosen
    raise ValueError(f"layers is {text!r}; it must be ascending numbers from 0 to {layers - 1}, or a count up to {layers}")


@torch.no_grad()
def begin(network: DistilledNetwork, chosen: Iterable[int], target: Target) -> None:
    """Take over the weights of the target's layers. A feed-forward of another width starts small and random."""
    names = {f"layers.{place}.": f"model.layers.{layer}." for place, layer in enumerate(chosen)} | {"norm.": "model.norm."}
    for name, parameter in network.named_parameters():
        if name == "adapter.weight":
            continue
        own, theirs = next((own, theirs) for own, theirs in names.items() if name.startswith(own))
        new = ".mlp." in name and network.config.intermediate_size != target.model.config.intermediate_size
        if not new:
            parameter.copy_(target.model.weight(theirs + name.removeprefix(own)))
        elif parameter.dim() > 1:
            parameter.normal_(std=(0.3 if "down_proj" in name else 1.0) * parameter.shape[1] ** -0.5)
        else:
            parameter.zero_()


@torch.no_grad()
def fit_lens(lesson: DraftLesson, answers: list[Answer]) -> None:
    """Set the adapter to what best takes the draft's last states to the target's: ridge regression over some answers."""
    width, device = lesson.network.config.hidden_size, lesson.tokens_V.device
    lens = Ridge(width, width, device)
    sizes: list[Tensor] = []
    for start in range(0, len(answers), AT_ONCE):
        some = answers[start : start + AT_ONCE]
        batch = collate(capture(lesson.target, some, lesson.taps, most_tokens=512, dtype=torch.float32), device)
        learns_BT = learning(batch)
        y_PC = batch.features["final_norm"][learns_BT]
        lens.add(lesson.network.read(*lesson.inputs(batch))[learns_BT], y_PC)
        sizes.append(y_PC.square().mean(-1).sqrt())
    lesson.network.adapter.weight.copy_(lens.solve(RIDGE))
    lesson.final_scale.fill_(float(torch.cat(sizes).median().clamp(min=1e-6)))
