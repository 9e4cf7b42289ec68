"""Memory of a Megatron run by part: of a GPU in each phase and on each pipeline stage, and of a host. Pure; estimates
from sizes alone, worked by hand for one model in docs/deepseek_r1.md.

Weights bfloat16; gradients one float32 buffer of all local parameters (Megatron's distributed data parallel); main
parameters and two moments float32, dealt over data x context ranks, those of experts over expert-data ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.algo.memory_plan import FIXED_BYTES, MARGIN
from rlkit.backends.megatron.architecture import Architecture
from rlkit.cli.megatron_layout import MegatronLayout
from rlkit.cli.megatron_params import RankParams, cache_bytes_per_token, engine_weight_bytes, rank_params

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes of a parameter."""
DEFAULT_LOGIT_ROWS = 1024

Parts = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronJob:
    """What the memory of a run follows from."""

    architecture: Architecture
    layout: MegatronLayout
    gpus_per_node: int
    num_tokens: int
    """Of the longest pack on one rank."""
    has_sequence_parallel: bool
    runs_per_rank: int
    """Virtual pipeline stages."""
    recompute: str | None
    """`full`, `selective` or None."""
    recompute_method: str | None
    recompute_layers: int | None
    logit_rows: int
    optimizer_on_host: bool
    num_frozen: int
    """Reference and teacher models of the same size."""
    bucket_bytes: int
    is_colocated: bool
    engine_width: int
    """GPUs of an engine; 0 where none is started."""
    engine_flags: Mapping[str, Any]
    is_fp8: bool
    gpu_bytes: int | None
    static_share: float | None
    """Of the GPU that SGLang takes for weights and cache."""


def stage_params(job: MegatronJob, stage: int) -> RankParams:
    layout = job.layout
    first = sum(layout.layers[:stage])
    return rank_params(
        job.architecture,
        range(first, first + layout.layers[stage]),
        tensor=layout.tensor,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        is_first=stage == 0,
        is_last=stage == layout.pipeline - 1,
    )


def optimizer_bytes(job: MegatronJob, stage: int) -> float:
    """Main parameters and moments of one rank."""
    params, layout = stage_params(job, stage), job.layout
    return OPTIMIZER * (params.dense / (layout.data * layout.context) + params.expert / layout.expert_data)


def training_parts(job: MegatronJob, stage: int) -> Parts:
    """Of a GPU at the peak of an optimizer step."""
    params = stage_params(job, stage)
    parts: Parts = {"weights": WEIGHT * params.total, "gradients": GRADIENT * params.total}
    if not job.optimizer_on_host:
        parts["optimizer"] = optimizer_bytes(job, stage)
    parts["activations"] = activation_bytes(job, stage)
    if stage == job.layout.pipeline - 1:
        parts["logits"] = logit_bytes(job)
    return parts | {"fixed": FIXED_BYTES}


def update_parts(job: MegatronJob) -> Parts:
    """While weights go to colocated engines: the trainer sleeps, engine weights are mapped, the cache is not."""
    architecture = job.architecture
    table = WEIGHT * architecture.vocab_size * architecture.hidden_size
    matrix = WEIGHT * architecture.ffn_size * architecture.hidden_size
    largest = max(table, matrix)
    return {
        "engine weights": sum(engine_parts(job).values()),
        # a tensor that is larger than a bucket travels alone; one buffer as gathered, one as engines load it
        "buckets": (1 + (job.is_fp8 or architecture.latent is not None)) * max(job.bucket_bytes, largest),
        "gathering": 2 * largest,
        "fixed": 2 * FIXED_BYTES,
    }


def generation_parts(job: MegatronJob) -> Parts:
    """Of a GPU of an engine; the trainer sleeps. The cache is what SGLang's share of the GPU leaves."""
    parts: Parts = {"engine weights": sum(engine_parts(job).values())}
    if job.gpu_bytes is not None and job.static_share is not None:
        parts["KV cache"] = max(0.0, job.static_share * job.gpu_bytes - parts["engine weights"])
    return parts | {"fixed": (1 + job.is_colocated) * FIXED_BYTES}


def engine_parts(job: MegatronJob) -> Parts:
    return engine_weight_bytes(job.architecture, job.engine_flags, width=job.engine_width, is_fp8=job.is_fp8)


def cache_tokens(job: MegatronJob) -> int | None:
    """Tokens that the cache of one GPU holds; every data-parallel part of an engine has such a cache."""
    cache = generation_parts(job).get("KV cache")
    if cache is None:
        return None
    return int(cache / cache_bytes_per_token(job.architecture, job.engine_flags, width=job.engine_width))


def host_parts(job: MegatronJob, stages: list[int]) -> Parts:
    """Of a node whose ranks belong to these pipeline stages, one entry a rank, at its fullest: the engines generate and
    the trainer sleeps; with the optimizer on the host it is there all the time.
    """
    parts: Parts = {}

    def add(name: str, num_bytes: float) -> None:
        parts[name] = parts.get(name, 0.0) + num_bytes

    for stage in stages:
        params = stage_params(job, stage)
        if job.optimizer_on_host:
            add("optimizer", optimizer_bytes(job, stage))
            add("gradients for it", optimizer_bytes(job, stage) * GRADIENT / OPTIMIZER)
        elif job.is_colocated:
            add("optimizer asleep", optimizer_bytes(job, stage))
        if job.is_colocated:
            add("weights asleep", WEIGHT * params.total)
        if job.num_frozen:
            add("frozen models", job.num_frozen * WEIGHT * params.total)
    return parts


def node_stages(job: MegatronJob, node: int) -> list[int]:
    """The pipeline stage of each rank of a node."""
    per_stage = job.layout.num_ranks // job.layout.pipeline
    first = node * job.gpus_per_node
    return [rank // per_stage for rank in range(first, min(first + job.gpus_per_node, job.layout.num_ranks))]


def fullest_node(job: MegatronJob) -> int:
    nodes = range(-(-job.layout.num_ranks // job.gpus_per_node))
    return max(nodes, key=lambda node: sum(host_parts(job, node_stages(job, node)).values()))


def activation_bytes(job: MegatronJob, stage: int) -> float:
    """What the layers of a stage keep for the backward pass, times the micro-batches that are under way there, and one
    layer at work: recomputed or meeting its gradients.

    Of p stages, stage s has p - s micro-batches under way (one-forward-one-backward schedule); with v runs of layers a
    rank it is 2 (p - s - 1) + (v - 1) p + 1 of v-ths of its layers (Narayanan et al., arXiv:2104.04473).
    """
    layout, layers = job.layout, job.layout.layers[stage]
    stages, runs = layout.pipeline, job.runs_per_rank
    first = sum(layout.layers[:stage])
    whole = [layer_activations(job, layer) for layer in range(first, first + layers)]
    kept_input = 2.0 * job.architecture.hidden_size * _rows(job)
    match job.recompute, job.recompute_method:
        case "full", "block":
            count = min(layers, job.recompute_layers or layers)
            kept = count * kept_input + sum(whole[count:])
        case "full", _:
            kept = -(-layers // (job.recompute_layers or 1)) * kept_input
        case _:
            kept = sum(whole)
    interleaved = (2 * (stages - stage - 1) + (runs - 1) * stages + 1) / runs
    under_way = interleaved if runs > 1 else stages - stage
    at_work = (job.recompute_layers or 1) if job.recompute == "full" and job.recompute_method != "block" else 1
    return MARGIN * (kept * under_way + (at_work + 1) * max(whole, default=0.0))


def layer_activations(job: MegatronJob, layer: int) -> float:
    """What one layer keeps of a pack, tensor by tensor, in bfloat16. Tokens are taken to be dealt evenly to experts."""
    architecture, tensor = job.architecture, job.layout.tensor
    hidden, tokens, rows = architecture.hidden_size, job.num_tokens, _rows(job)
    kept = 4 * hidden * rows  # both norms' inputs and outputs
    kept += sum(_attention_widths(architecture, tensor)) * tokens
    if not architecture.is_expert_layer(layer):
        return 2.0 * (kept + 3 * architecture.ffn_size / tensor * tokens)
    assert architecture.experts is not None
    sparse, parts = architecture.experts, job.layout.expert_tensor
    # every token is sent to top_k experts; with expert tensor parallelism each rank sees the tokens of all of them
    sent = rows * sparse.top_k * parts
    kept += sent * (2 * hidden + 3 * sparse.ffn_size / parts)
    kept += 3 * sparse.shared_size / tensor * tokens + sparse.num_experts * rows
    return 2.0 * kept


def _attention_widths(architecture: Architecture, tensor: int) -> Iterator[float]:
    """Columns that attention keeps of a token: inputs of its matrices, queries, keys, values, output."""
    heads, latent = architecture.num_heads / tensor, architecture.latent
    if latent is None:
        keys = max(1.0, architecture.num_kv_heads / tensor)
        yield 2 * architecture.head_size * (heads + keys)
        return
    query = latent.nope_size + latent.rope_size
    yield latent.kv_rank + latent.rope_size + (latent.q_rank or 0)
    yield heads * (2 * query + 2 * latent.v_size)


def logit_bytes(job: MegatronJob) -> float:
    """One chunk of logits: bfloat16, its gradient, and two copies in float32."""
    vocab = -(-job.architecture.vocab_size // job.layout.tensor)
    return float(min(job.logit_rows, job.num_tokens) * vocab * (2 + 2 + 4 + 4))


def _rows(job: MegatronJob) -> float:
    """Tokens of which a rank holds the whole hidden state between layers."""
    return job.num_tokens / (job.layout.tensor if job.has_sequence_parallel else 1)
