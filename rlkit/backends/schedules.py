"""Learning-rate schedules: a rate for each optimizer step. Used by every backend's trainer.

A schedule's only state is the number of optimizer steps, so a resumed run cannot count one twice.
"""

import math
from dataclasses import dataclass
from typing import Self

from rlkit.config.schema import OptimizerConfig, RunConfig
from rlkit.types.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The flags `--lr...`, with what depends on the length of the run filled in."""

    cfg: OptimizerConfig
    warmup_steps: int
    end: int | None
    """Step from which the rate is `--min-lr`; None where the run has no known end."""

    @classmethod
    def of(cls, cfg: RunConfig) -> Self:
        """Raises ConfigError where a decay, or a share of the run, has no end to be counted from."""
        style, fraction, end = cfg.optimizer.lr_decay_style, cfg.optimizer.lr_warmup_fraction, cfg.schedule_end
        if end is None and style not in ("constant", "inverse-square-root"):
            raise ConfigError(f"--lr-decay-style {style} needs an end: set --lr-decay-iters or --num-rollout")
        if end is None and fraction is not None:
            raise ConfigError(f"--lr-warmup-fraction {fraction} of an unknown length: set --lr-decay-iters")
        return cls(cfg=cfg.optimizer, warmup_steps=cfg.warmup_steps, end=end)

    def rate(self, optimizer_step: int) -> float:
        """Rate of the 0-based step.

        Warm-up rises linearly from `lr_warmup_init` and reaches `lr` at its last step (the first step trains already:
        at a rate of 0 its rollout would be wasted). The decay begins after it and is `min_lr` from `end` on.
        """
        cfg, warmup = self.cfg, self.warmup_steps
        if optimizer_step < warmup:
            return cfg.lr_warmup_init + (cfg.lr - cfg.lr_warmup_init) * (optimizer_step + 1) / warmup
        if cfg.lr_decay_style == "constant":
            return cfg.lr
        if self.end is not None and optimizer_step >= self.end:
            return cfg.min_lr
        if cfg.lr_decay_style == "inverse-square-root":
            # continuous with the warm-up, as in "Attention Is All You Need" (Vaswani et al., 2017), section 5.3
            return max(cfg.min_lr, cfg.lr * math.sqrt(max(warmup, 1) / max(optimizer_step, 1)))
        assert self.end is not None
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * self._share(optimizer_step, self.end)

    def _share(self, optimizer_step: int, end: int) -> float:
        """How much of the way from `min_lr` to `lr` is left, in [0, 1]."""
        cfg = self.cfg
        if cfg.lr_decay_style == "WSD":
            assert cfg.lr_wsd_decay_iters is not None, "a rule demands it"
            progress = (optimizer_step - (end - cfg.lr_wsd_decay_iters)) / cfg.lr_wsd_decay_iters
            return _wsd_share(cfg, max(0.0, progress))
        progress = (optimizer_step - self.warmup_steps) / (end - self.warmup_steps)
        return 1.0 - progress if cfg.lr_decay_style == "linear" else _half_cosine(progress)


def _wsd_share(cfg: OptimizerConfig, progress: float) -> float:
    """Warm-up, stable, decay (Hu et al., MiniCPM, 2024), and 1 - sqrt (Haegele et al., 2024)."""
    match cfg.lr_wsd_decay_style:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return _half_cosine(progress)
        case "exponential":
            return 2.0 * 0.5**progress - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(progress)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))
