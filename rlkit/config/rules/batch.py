"""Batch arithmetic: prompts x samples -> optimizer steps x global batch -> samples per rank."""

from rlkit.config.rules.required import trains
from rlkit.config.schema import RunConfig


def batch_sizes_agree(cfg: RunConfig) -> str | None:
    batch, steps = cfg.train.global_batch_size, cfg.train.num_steps_per_rollout
    total = cfg.samples_per_rollout
    if batch is None or steps is None or not trains(cfg) or batch * steps == total:
        return None
    return (
        f"global_batch_size * num_steps_per_rollout = {batch} * {steps} = {batch * steps}, but {_total(cfg)};"
        " pass only one of --global-batch-size and --num-steps-per-rollout"
    )


def rollout_fills_whole_steps(cfg: RunConfig) -> str | None:
    batch, total = cfg.train.global_batch_size, cfg.samples_per_rollout
    if batch is None or cfg.train.num_steps_per_rollout is not None or not trains(cfg) or total % batch == 0:
        return None
    if total < batch:
        rollouts = cfg.rollout.num_rollout
        whole_run = f" ({total * rollouts} in all num_rollout = {rollouts} rollouts)" if rollouts else ""
        return (
            f"global_batch_size = {batch} is more than one rollout has: {_total(cfg)}{whole_run};"
            f" pass --global-batch-size {total} or less, or a larger --rollout-batch-size"
        )
    return (
        f"global_batch_size = {batch} does not divide the samples of a rollout: {_total(cfg)},"
        f" and {total % batch} would be left over; pass a --global-batch-size that divides {total}"
    )


def rollout_splits_into_steps(cfg: RunConfig) -> str | None:
    steps, total = cfg.train.num_steps_per_rollout, cfg.samples_per_rollout
    if steps is None or cfg.train.global_batch_size is not None or not trains(cfg) or total % steps == 0:
        return None
    return (
        f"num_steps_per_rollout = {steps} does not divide the samples of a rollout: {_total(cfg)};"
        f" pass a --num-steps-per-rollout that divides {total}"
    )


def step_splits_evenly_over_ranks(cfg: RunConfig) -> str | None:
    ranks, batch = cfg.data_parallel_size, _samples_per_step(cfg)
    if batch is None or not trains(cfg) or ranks == 0 or batch % ranks == 0:
        return None
    given = "global_batch_size" if cfg.train.global_batch_size is not None else "samples per optimizer step"
    nodes, per_node, cp = (
        cfg.cluster.actor_num_nodes,
        cfg.cluster.actor_num_gpus_per_node,
        cfg.train.context_parallel_size,
    )
    layout = f"actor_num_nodes * actor_num_gpus_per_node = {nodes} * {per_node}"
    return (
        f"{given} = {batch} does not divide evenly over {ranks} data-parallel training ranks"
        f" ({layout}{f', context_parallel_size = {cp}' if cp > 1 else ''});"
        f" pass a --global-batch-size that is a multiple of {ranks}, or another --actor-num-gpus-per-node"
    )


def _samples_per_step(cfg: RunConfig) -> int | None:
    """Samples of one optimizer step; None where another rule has already found the arithmetic wrong."""
    batch, steps, total = cfg.train.global_batch_size, cfg.train.num_steps_per_rollout, cfg.samples_per_rollout
    if batch is not None:
        return batch if total % batch == 0 and total > 0 else None
    if steps is not None:
        return total // steps if total % steps == 0 else None
    return total


def _total(cfg: RunConfig) -> str:
    prompts, samples = cfg.rollout.rollout_batch_size, cfg.rollout.n_samples_per_prompt
    return f"rollout_batch_size * n_samples_per_prompt = {prompts} * {samples} = {prompts * samples}"


def ranks_split_into_context_groups(cfg: RunConfig) -> str | None:
    ranks, cp = cfg.cluster.actor_num_gpus, cfg.train.context_parallel_size
    if not trains(cfg) or cp < 1 or ranks % cp == 0:
        return None
    return (
        f"context_parallel_size = {cp} does not divide the {ranks} training ranks (actor_num_nodes *"
        f" actor_num_gpus_per_node); pass a --context-parallel-size that divides {ranks}"
    )


RULES = (
    ranks_split_into_context_groups,
    batch_sizes_agree,
    rollout_fills_whole_steps,
    rollout_splits_into_steps,
    step_splits_evenly_over_ranks,
)
