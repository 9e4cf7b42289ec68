"""The dry run's plan of a Megatron run: groups as Megatron-Core makes them, parameters as the backend has them, memory
by arithmetic written out, and every impossible layout named."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rlkit.algo.memory_plan import GIB
from rlkit.backends.megatron.architecture import architecture_of
from rlkit.cli.dry_run_megatron import group_lines, megatron_job, memory_lines, require_possible
from rlkit.cli.megatron_layout import MegatronLayout, groups_along, stage_layers, written
from rlkit.cli.megatron_memory import (
    activation_bytes,
    cache_tokens,
    fullest_node,
    host_parts,
    node_stages,
    optimizer_bytes,
    stage_params,
    training_parts,
    update_parts,
)
from rlkit.cli.megatron_params import cache_bytes_per_token, engine_weight_bytes, rank_params, total_params
from rlkit.config.errors import ConfigError
from rlkit.config.schema import ClusterConfig, EngineConfig, MegatronConfig, ModelConfig, RolloutConfig, RunConfig
from rlkit.config.schema import TrainConfig as Train
from rlkit.orchestration.layout import plan_layout

MODELS = Path(__file__).parents[2] / "scripts" / "models"
ENGINE = {
    "ep_size": 64,
    "enable_dp_attention": True,
    "dp_size": 8,
    "moe_dense_tp_size": 1,
    "enable_dp_lm_head": True,
    "moe_a2a_backend": "deepep",
    "speculative_algorithm": "EAGLE",
    "mem_fraction_static": 0.7,
}
R1 = RunConfig(
    model=ModelConfig(hf_checkpoint=str(MODELS / "DeepSeek-R1")),
    cluster=ClusterConfig(
        actor_num_nodes=16,
        actor_num_gpus_per_node=8,
        colocate=True,
        rollout_num_gpus_per_engine=64,
        device="cuda",
        gpu_memory_gib=80.0,
        host_memory_gib=2000.0,
    ),
    train=Train(train_backend="megatron", context_parallel_size=4, max_tokens_per_gpu=16384),
    megatron=MegatronConfig(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        sequence_parallel=True,
        expert_model_parallel_size=32,
        expert_tensor_parallel_size=1,
        decoder_last_pipeline_num_layers=13,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        optimizer_cpu_offload=True,
    ),
    rollout=RolloutConfig(rollout_max_response_len=32768),
    engine=EngineConfig(rollout_engine="sglang", sglang=ENGINE),
)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((MODELS / name / "config.json").read_text()) | changes


def architecture(name: str, **changes: Any):
    return architecture_of(config_of(name, **changes), name)


TINY = {
    "deepseek": architecture(
        "DeepSeek-R1",
        num_hidden_layers=5,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_attention_heads=8,
        vocab_size=101,
        kv_lora_rank=12,
        q_lora_rank=20,
        n_shared_experts=2,
        first_k_dense_replace=2,
    ),
    "uncompressed queries": architecture(
        "DeepSeek-R1", num_hidden_layers=2, hidden_size=32, q_lora_rank=None, n_routed_experts=8, vocab_size=64
    ),
    "qwen3_moe": architecture(
        "Qwen3-30B-A3B", num_hidden_layers=3, hidden_size=32, num_experts=4, vocab_size=101, mlp_only_layers=[1]
    ),
    "qwen2": architecture_of(
        config_of("Qwen3-30B-A3B", model_type="qwen2", num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True),
        "qwen2",
    ),
}


def test_public_totals():
    """Model cards: 671 B, of which the index counts 671,026,419,200 with the routers' biases (58 layers x 256), which
    are buffers; 30.5 B of Qwen3-30B-A3B are 30,532,122,624."""
    assert total_params(architecture("DeepSeek-R1")) == 671_026_419_200 - 58 * 256
    assert total_params(architecture("Qwen3-30B-A3B")) == 30_532_122_624


LAYOUTS = [
    MegatronLayout(
        tensor=8, context=4, data=1, pipeline=4, expert_tensor=1, expert=32, expert_data=1, layers=(16, 16, 16, 13)
    ),
    MegatronLayout(tensor=2, context=2, data=3, pipeline=2, expert_tensor=2, expert=3, expert_data=2, layers=(1, 1)),
    MegatronLayout(tensor=1, context=1, data=8, pipeline=1, expert_tensor=1, expert=4, expert_data=2, layers=(1,)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.num_ranks))
def test_groups_are_those_of_megatron_core(layout):
    state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"
    dense = state.RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=layout.context, order=order
    )
    sparse = state.RankGenerator(
        tp=layout.expert_tensor, ep=layout.expert, dp=layout.expert_data, pp=layout.pipeline, cp=1, order=order
    )
    expected = {"tensor": (dense, "tp"), "context": (dense, "cp"), "data": (dense, "dp"), "pipeline": (dense, "pp")}
    expected |= {"expert tensor": (sparse, "tp"), "expert": (sparse, "ep"), "expert data": (sparse, "dp")}
    found = layout.groups()
    assert found.keys() <= expected.keys()
    for axis, groups in found.items():
        generator, token = expected[axis]
        assert sorted(groups) == sorted(map(tuple, generator.get_ranks(token))), axis
        assert sorted(rank for group in groups for rank in group) == list(range(layout.num_ranks))


def test_groups_by_hand():
    assert groups_along((2, 3), 0) == [(0, 1), (2, 3), (4, 5)]
    assert groups_along((2, 3), 1) == [(0, 2, 4), (1, 3, 5)]
    assert [written((3,)), written((0, 1, 2)), written((0, 8, 16))] == ["3", "0-2", "0-16 by 8"]


@pytest.mark.parametrize(
    "layers, stages, first, last", [(61, 4, None, 13), (61, 8, 7, 6), (8, 2, None, None), (5, 2, 2, 3), (4, 1, 4, None)]
)
def test_stages_are_those_of_the_backend(layers, stages, first, last):
    pytest.importorskip("megatron.core")
    from rlkit.backends.megatron.parallel import deal_layers

    chunks = deal_layers(layers, stages=stages, first=first, last=last)
    assert stage_layers(layers, stages, first=first, last=last) == tuple(len(chunk.layers) for chunk in chunks)


@pytest.mark.parametrize("tensor, expert, expert_tensor", [(1, 1, 1), (2, 4, 1), (4, 2, 2)])
@pytest.mark.parametrize("model", TINY.values(), ids=TINY)
def test_parameters_of_a_rank_are_those_of_the_backend(model, tensor, expert, expert_tensor):
    pytest.importorskip("megatron.core")
    from rlkit.backends.megatron.names import entries
    from rlkit.backends.megatron.parallel import deal_layers

    for stages in (1, 2) if model.num_layers % 2 == 0 else (1,):
        chunks = deal_layers(model.num_layers, stages=stages)
        for chunk in chunks:
            dense = experts = 0
            for entry in entries(model, [chunk], expert_ranks=expert):
                for piece in entry.pieces:
                    if piece.is_float32:
                        continue  # the router's bias, a buffer
                    split = expert_tensor if entry.expert is not None else tensor
                    shape = list(piece.shape)
                    if piece.axis is not None:
                        shape[piece.axis] = -(-shape[piece.axis] // split)
                    if entry.expert is None:
                        dense += prod(shape)
                    elif entry.expert // ((model.experts.num_experts) // expert) == 0:  # the first expert rank's
                        experts += prod(shape)
            found = rank_params(
                model,
                chunk.layers,
                tensor=tensor,
                expert=expert,
                expert_tensor=expert_tensor,
                is_first=chunk.is_first,
                is_last=chunk.is_last,
            )
            assert (found.dense, found.expert) == (dense, experts)


def test_r1_by_hand():
    """docs/deepseek_r1.md, line by line. Stage 1 has 16 layers with experts."""
    job = megatron_job(R1, architecture("DeepSeek-R1"))
    experts = 16 * (256 // 32) * 3 * 7168 * 2048
    norms = 1536 + 512 + 2 * 7168
    dealt = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 3 * 7168 * 2048
    dense = 16 * (norms + dealt // 8 + 256 * 7168)
    params = stage_params(job, 1)
    assert (params.dense, params.expert) == (dense, experts)
    parts = training_parts(job, 1)
    assert parts["weights"] == 2 * (dense + experts) and parts["gradients"] == 4 * (dense + experts)
    assert "optimizer" not in parts and "logits" not in parts
    assert optimizer_bytes(job, 1) == 12 * (dense / 4 + experts)
    # 16 layers' inputs of 16384 / 8 tokens each, three micro-batches under way behind the first stage
    kept = 3 * 16 * 2 * 7168 * 16384 / 8
    assert 1.05 * kept < activation_bytes(job, 1) < 1.05 * kept + 3 * GIB
    host = host_parts(job, [1] * 8)
    assert host == {
        "optimizer": pytest.approx(8 * 12 * (dense / 4 + experts)),
        "gradients for it": pytest.approx(8 * 4 * (dense / 4 + experts)),
        "weights asleep": 8 * 2 * (dense + experts),
    }
    assert node_stages(job, fullest_node(job)) == [1] * 8
    embedding = 2 * 129280 * 7168  # larger than a bucket: alone in one, gathered and as the engine loads it
    assert embedding > R1.sync.update_weight_buffer_size
    update = update_parts(job)
    assert (update["buckets"], update["gathering"]) == (2 * embedding, 2 * embedding)


def test_r1_engine_by_hand():
    """One GPU of 64: four experts of each layer, shared experts and dense layers whole, attention by eight."""
    model = architecture("DeepSeek-R1")
    parts = engine_weight_bytes(model, ENGINE, width=64, is_fp8=True)
    fp8 = 1 + 4 / 128**2
    expert = 3 * 7168 * 2048
    assert parts["experts"] == pytest.approx(fp8 * 59 * 4 * expert)  # 58 layers and the draft's
    assert parts["shared experts"] == pytest.approx(fp8 * 59 * expert)
    assert parts["dense MLP"] == pytest.approx(fp8 * 3 * 3 * 7168 * 18432)
    plain = engine_weight_bytes(model, ENGINE, width=64, is_fp8=False)
    assert plain["experts"] == pytest.approx(2 * 59 * 4 * expert)
    assert cache_bytes_per_token(model, ENGINE, width=64) == 2 * 62 * 576
    job = megatron_job(R1, model)
    assert cache_tokens(job) == int((0.7 * 80 * GIB - sum(parts.values())) / (2 * 62 * 576))
    qwen = architecture("Qwen3-30B-A3B")
    whole = engine_weight_bytes(qwen, {}, width=1, is_fp8=False)
    assert sum(whole.values()) == pytest.approx(2 * (total_params(qwen) - qwen.hidden_size))
    assert cache_bytes_per_token(qwen, {}, width=8) == 2 * 2 * 48 * 1 * 128


def test_optimizer_on_the_gpu_and_asleep():
    cfg = replace(R1, megatron=replace(R1.megatron, optimizer_cpu_offload=False))
    job = megatron_job(cfg, architecture("DeepSeek-R1"))
    assert training_parts(job, 1)["optimizer"] == optimizer_bytes(job, 1)
    assert host_parts(job, [1])["optimizer asleep"] == optimizer_bytes(job, 1)
    (line, *_) = [line for line in memory_lines(cfg) if "DOES NOT FIT: train" in line]
    assert "pass --optimizer-cpu-offload" in line
    split = replace(cfg, cluster=replace(cfg.cluster, colocate=False, rollout_num_gpus=64))
    assert host_parts(megatron_job(split, architecture("DeepSeek-R1")), [1]) == {}


def test_activations_follow_recomputation_and_schedule():
    job = megatron_job(R1, architecture("DeepSeek-R1"))

    def of(stage: int = 1, **changes: Any) -> float:
        return activation_bytes(replace(job, **changes), stage)

    assert of(recompute=None, recompute_method=None) > 5 * of()
    assert of() < of(recompute_method="block", recompute_layers=8) < of(recompute=None, recompute_method=None)
    assert of(recompute_layers=4) != of()
    assert of(stage=0) > of(stage=1) > of(stage=2)
    assert of(has_sequence_parallel=False) > 4 * of()
    assert of(num_tokens=2 * job.num_tokens) == pytest.approx(2 * of())
    assert of(runs_per_rank=2) > of()


def test_what_is_printed():
    require_possible(R1)
    text = "\n".join([*group_lines(R1, plan_layout(R1)), *memory_lines(R1)])
    for expected in (
        "tensor        16 groups of 8: 0-7, 8-15, 16-23, ..., 120-127",
        "pipeline      32 groups of 4: 0-96 by 32",
        "expert        4 groups of 32: 0-31, 32-63, 64-95, 96-127",
        "stage 3       13 layers (48 to 60) and the head, ranks 96 to 127",
        "engine 1      GPUs 64-127 (nodes 8-15): tensor 64, attention in 8 data-parallel parts, expert 64",
        "671,026,404,352 parameters",
        "KV cache of an engine: 8 x",
        "host, fullest node (4)",
        "gradients for it",
    ):
        assert expected in text, expected
    assert "DOES NOT FIT" not in text


def megatron(**changes: Any) -> RunConfig:
    return replace(R1, megatron=replace(R1.megatron, **changes))


def cluster(**changes: Any) -> RunConfig:
    return replace(R1, cluster=replace(R1.cluster, **changes))


def engine(**changes: Any) -> RunConfig:
    return replace(R1, engine=replace(R1.engine, sglang=ENGINE | changes))


IMPOSSIBLE = {
    "ranks": (cluster(actor_num_nodes=15), "120 training ranks do not divide by .* = 8 x 4 x 4 = 128"),
    "tensor over nodes": (
        replace(cluster(actor_num_gpus_per_node=4, actor_num_nodes=32)),
        "tensor_model_parallel_size = 8 would reach over nodes of 4 ranks",
    ),
    "expert ranks": (
        megatron(expert_model_parallel_size=64),
        "the 32 ranks of a pipeline stage do not divide by expert x expert-tensor parallel = 64 x 1",
    ),
    "stages": (
        megatron(decoder_last_pipeline_num_layers=None),
        "num_hidden_layers = 61 does not divide over 4 pipeline stages",
    ),
    "last stage": (
        megatron(decoder_last_pipeline_num_layers=12),
        "num_hidden_layers = 61 less 12 at the ends does not divide over 3 pipeline stages",
    ),
    "no layers left": (
        megatron(decoder_first_pipeline_num_layers=50, decoder_last_pipeline_num_layers=11),
        "less 50 and 11 at the ends does not divide over 2",
    ),
    "virtual stages": (
        megatron(num_virtual_stages_per_pipeline_rank=2),
        "a pipeline stage of 13 layers does not divide into num_virtual_stages_per_pipeline_rank = 2 runs",
    ),
    "experts": (
        megatron(expert_model_parallel_size=24, pipeline_model_parallel_size=4),
        "256 experts do not divide by expert_model_parallel_size = 24",
    ),
    "sequence parallel": (megatron(sequence_parallel=False), "need --sequence-parallel"),
    "engine experts": (engine(ep_size=48), "256 experts do not divide by --sglang-ep-size 48"),
    "cut experts": (engine(ep_size=1), "moe_intermediate_size = 2048 would be cut into 64 parts of 32"),
    "cut dense layers": (
        engine(moe_dense_tp_size=64),
        "intermediate_size = 18432 would be cut into 64 parts of 288, not a multiple of the block of 128",
    ),
}


@pytest.mark.parametrize("cfg, message", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_layouts_are_refused(cfg, message):
    with pytest.raises(ConfigError, match=message):
        require_possible(cfg)


def test_heads_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("Qwen3-30B-A3B")))
    cfg = replace(
        R1,
        model=ModelConfig(hf_checkpoint=str(folder)),
        megatron=MegatronConfig(tensor_model_parallel_size=8, sequence_parallel=True, expert_model_parallel_size=8),
    )
    with pytest.raises(ConfigError, match="num_key_value_heads = 4 does not divide by tensor_model_parallel_size = 8"):
        require_possible(cfg)


def test_fsdp_is_not_asked():
    require_possible(replace(IMPOSSIBLE["ranks"][0], train=Train()))


def test_the_recipe_refuses_as_well():
    root = MODELS.parents[1]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "scripts/run-deepseek-r1.sh", "--dry-run", "--decoder-last-pipeline-num-layers", "12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=60, check=False)
    assert done.returncode == 2
    assert "num_hidden_layers = 61 less 12 at the ends does not divide over 3 pipeline stages" in done.stderr
    assert "Dry run: nothing was started" not in done.stdout
