"""PPO's critic written out: one sample after the other, a plain transformers model, autograd and no packing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlkit.config.schema import RunConfig
from rlkit.types.samples import Sample


class PlainCritic(nn.Module):
    """A transformers model of a checkpoint with a linear head."""

    def __init__(self, path: Path, head: Tensor) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.backbone = model.base_model
        self.head = nn.Parameter(head.clone())

    def forward(self, sample: Sample) -> Tensor:
        """[response tokens]: the value of the state before each."""
        hidden = self.backbone(input_ids=torch.tensor([sample.tokens]), use_cache=False).last_hidden_state[0]
        return (hidden @ self.head.T).squeeze(1)[sample.prompt_length - 1 : sample.total_length - 1]


@dataclass(frozen=True, kw_only=True)
class NaiveFit:
    """One optimizer step's worth of a critic."""

    loss: float
    grad_norm: float
    explained_variance: float
    value_mean: float
    advantages: list[Tensor]
    """Of each sample's response tokens; 0 where masked."""


def naive_fit(critic: PlainCritic, cfg: RunConfig, samples: Sequence[Sample]) -> NaiveFit:
    """At the first step old values are the current ones."""
    kept = [sample for sample in samples if any(sample.loss_mask)]
    total, flat_values, flat_returns = torch.zeros(()), [], []
    advantages_of: dict[int, Tensor] = {}
    for sample in kept:
        values = critic(sample)
        places = [place for place, is_trained in enumerate(sample.loss_mask) if is_trained]
        advantages, running = torch.zeros(len(values)), 0.0
        for number in reversed(range(len(places))):
            last = number == len(places) - 1
            reward = sample.reward if last else 0.0
            following = 0.0 if last else values[places[number + 1]].item()
            delta = reward + cfg.algo.gamma * following - values[places[number]].item()
            running = delta + cfg.algo.gamma * cfg.critic.lambd * running
            advantages[places[number]] = running
        advantages_of[id(sample)] = advantages
        returns = advantages[places] + values[places].detach()
        total = total + 0.5 * (values[places] - returns).square().mean() / len(kept)
        flat_values.append(values[places].detach())
        flat_returns.append(returns)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in critic.parameters() if p.grad is not None]).norm()
    values, returns = torch.cat(flat_values), torch.cat(flat_returns)
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    return NaiveFit(
        loss=total.item(),
        grad_norm=norm.item(),
        explained_variance=explained.item(),
        value_mean=values.mean().item(),
        advantages=[advantages_of.get(id(s), torch.zeros(s.response_length)) for s in samples],
    )


def with_head(path: Path, target: Path, *, seed: int = 3) -> Tensor:
    """Copy a checkpoint to `target` with a value head in it; returns the head."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    width = tensors["model.embed_tokens.weight"].shape[1]
    head = 0.5 * torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    save_file({**tensors, "score.weight": head}, target / "model.safetensors", metadata={"format": "pt"})
    return head


def ppo(cfg: RunConfig, **critic: object) -> RunConfig:
    return replace(
        cfg,
        algo=replace(cfg.algo, advantage_estimator="ppo"),
        critic=replace(cfg.critic, **critic),  # pyright: ignore[reportArgumentType]
    )
