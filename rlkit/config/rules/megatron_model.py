"""Whether a model can be laid out over ranks as the flags of `--train-backend megatron` say, and over the GPUs of an
engine: what needs the model's config.json to be known. Asked before a launch, and by the dry run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlkit.config.rules.paths import read_model_config
from rlkit.config.schema import RunConfig

FP8_BLOCK = 128


def megatron_layout_is_possible(cfg: RunConfig) -> list[str]:
    """Every constraint that the layout breaks, with the numbers and a remedy; none where config.json is not there."""
    if cfg.train.train_backend != "megatron":
        return []
    model = read_model_config(cfg.model.hf_checkpoint)
    found = list(_ranks(cfg))
    if model is not None:
        found += [*_stages(cfg, model), *_widths(cfg, model), *_experts(cfg, model)]
        if cfg.starts_engines:
            found += _engine(cfg, model)
    return found


def num_experts(model: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 of a dense model."""
    return model.get("n_routed_experts") or model.get("num_experts") or model.get("num_local_experts") or 0


def _ranks(cfg: RunConfig) -> Iterator[str]:
    ranks, sizes, cp = cfg.cluster.actor_num_gpus, cfg.megatron, cfg.train.context_parallel_size
    tensor, stages = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    product = tensor * stages * cp
    if ranks % product:
        yield (
            f"{ranks} training ranks do not divide by tensor x pipeline x context parallel = {tensor} x {stages} x {cp}"
            f" = {product}; change --actor-num-nodes, --actor-num-gpus-per-node or one of the three"
        )
    if cfg.cluster.actor_num_gpus_per_node % tensor:
        yield (
            f"tensor_model_parallel_size = {tensor} would reach over nodes of {cfg.cluster.actor_num_gpus_per_node}"
            " ranks: every layer waits for its ranks several times; pass one that divides the ranks of a node"
        )
    expert = sizes.expert_model_parallel_size * sizes.expert_tensor_size
    if ranks % stages == 0 and (ranks // stages) % expert:
        yield (
            f"the {ranks // stages} ranks of a pipeline stage do not divide by expert x expert-tensor parallel ="
            f" {sizes.expert_model_parallel_size} x {sizes.expert_tensor_size} = {expert}; change"
            " --expert-model-parallel-size or --expert-tensor-parallel-size"
        )


def _stages(cfg: RunConfig, model: Mapping[str, Any]) -> Iterator[str]:
    sizes, layers = cfg.megatron, model["num_hidden_layers"]
    stages = sizes.pipeline_model_parallel_size
    ends = [n for n in (sizes.decoder_first_pipeline_num_layers, sizes.decoder_last_pipeline_num_layers) if n]
    middle, rest = stages - len(ends), layers - sum(ends)
    said = f"num_hidden_layers = {layers}" + (f" less {' and '.join(map(str, ends))} at the ends" if ends else "")
    remedy = "set --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers so that the rest divides"
    if len(ends) > stages or (middle == 0 and rest != 0):
        yield f"{said} leaves {rest} layers for {max(0, middle)} pipeline stages; {remedy}"
    elif middle > 0 and (rest % middle or rest < middle):
        yield f"{said} does not divide over {middle} pipeline stages; {remedy}"
    else:
        runs = sizes.virtual_pipeline_size or 1
        uneven = [n for n in {*ends, rest // middle if middle else 0} if n % runs]
        if uneven:
            yield (
                f"a pipeline stage of {uneven[0]} layers does not divide into num_virtual_stages_per_pipeline_rank ="
                f" {runs} runs; pass a number that divides the layers of every stage"
            )


def _widths(cfg: RunConfig, model: Mapping[str, Any]) -> Iterator[str]:
    tensor = cfg.megatron.tensor_model_parallel_size
    names = ["num_attention_heads", "intermediate_size"]
    if not model.get("kv_lora_rank"):
        names.append("num_key_value_heads")
    for name in names:
        if model.get(name) and model[name] % tensor:
            yield (
                f"{name} = {model[name]} does not divide by tensor_model_parallel_size = {tensor}; pass a"
                " --tensor-model-parallel-size that divides it"
            )


def _experts(cfg: RunConfig, model: Mapping[str, Any]) -> Iterator[str]:
    sizes, experts = cfg.megatron, num_experts(model)
    if experts == 0:
        if sizes.expert_model_parallel_size > 1:
            yield (
                f"expert_model_parallel_size = {sizes.expert_model_parallel_size}, but the model has no experts; remove"
                " it"
            )
        return
    if experts % sizes.expert_model_parallel_size:
        yield (
            f"{experts} experts do not divide by expert_model_parallel_size = {sizes.expert_model_parallel_size}; pass"
            " an --expert-model-parallel-size that divides them"
        )
    ffn = model.get("moe_intermediate_size")
    if ffn and ffn % sizes.expert_tensor_size:
        yield (
            f"moe_intermediate_size = {ffn} does not divide by the expert tensor parallel size"
            f" {sizes.expert_tensor_size}; pass --expert-tensor-parallel-size 1"
        )
    if sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        yield (
            f"experts with tensor_model_parallel_size = {sizes.tensor_model_parallel_size} need --sequence-parallel:"
            " Megatron deals tokens to experts by tensor-parallel rank"
        )


def _engine(cfg: RunConfig, model: Mapping[str, Any]) -> Iterator[str]:
    """Experts of SGLang, and the blocks of fp8 that must not be cut."""
    passed, experts = cfg.engine.sglang, num_experts(model)
    width = cfg.cluster.rollout_num_gpus_per_engine // passed.get("pp_size", 1)
    ep = passed.get("ep_size", 1)
    if experts and (experts + passed.get("ep_num_redundant_experts", 0)) % ep:
        yield (
            f"{experts} experts do not divide by --sglang-ep-size {ep}; pass one that divides them, or add"
            " --sglang-ep-num-redundant-experts"
        )
    if not model.get("quantization_config") or width % ep:
        return
    ffn = model.get("moe_intermediate_size")
    if experts and ffn and (ffn // (width // ep)) % FP8_BLOCK:
        yield (
            f"an fp8 expert of moe_intermediate_size = {ffn} would be cut into {width // ep} parts of"
            f" {ffn // (width // ep)}, not a multiple of the block of {FP8_BLOCK}; pass --sglang-ep-size {width}"
        )
    dense = passed.get("moe_dense_tp_size", width)
    if model.get("first_k_dense_replace") and (model["intermediate_size"] // dense) % FP8_BLOCK:
        yield (
            f"an fp8 layer of intermediate_size = {model['intermediate_size']} would be cut into {dense} parts of"
            f" {model['intermediate_size'] / dense:g}, not a multiple of the block of {FP8_BLOCK}; pass"
            " --sglang-moe-dense-tp-size 1"
        )
