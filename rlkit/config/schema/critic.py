"""What PPO's critic is, and how it learns."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """The critic of `--advantage-estimator ppo`: the policy's backbone with a scalar head, inside the same ranks."""

    critic_load: str | None = None
    """Folder of the Hugging Face checkpoint that the critic starts from; unset means `--hf-checkpoint`. A value head in
    it (`score.weight`, as in token classifiers of one label) is taken over; without one values start at 0."""
    critic_save: str | None = None
    """Also export the critic here at every save, as a token classifier of one label that `--critic-load` reads;
    `{rollout_id}` becomes the step."""
    critic_lr: float | None = None
    """Peak learning rate of the critic; unset means `--lr`. Its decay is the policy's."""
    critic_lr_warmup_iters: int = 0
    """Optimizer steps of linear warm-up of the critic's rate."""
    num_critic_only_steps: int = 0
    """Train the critic alone for so many rollouts of the run, before the policy begins to learn."""
    value_clip: float = 0.2
    """Values may move this far from those before the rollout's first step, before their loss stops pulling."""
    lambd: float = 1.0
    """Lambda of generalised advantage estimation: 1 sums up rewards to the end, 0 trusts the next value."""
