"""The Megatron backend on one rank, and its pure parts."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (pip install rlkit[megatron])")

import torch
from fsdp_setup import MIXED_LENGTHS, VOCAB, all_weights, make_samples, make_updates, naive_log_probs, start_backend
from megatron.core import parallel_state
from megatron_setup import MODELS, hf_tensors, megatron_config, rank_of, save_models
from transformers import AutoModelForCausalLM

from rlkit.backends.base import Backend
from rlkit.backends.fsdp.fingerprint import file_fingerprints
from rlkit.backends.megatron.architecture import architecture_of, read_architecture
from rlkit.backends.megatron.backend import BackendState, MegatronBackend
from rlkit.backends.megatron.batches import micro_batch
from rlkit.backends.megatron.names import entries, pack_heads, unpack_heads
from rlkit.backends.megatron.parallel import deal_layers, stage_sizes
from rlkit.config.schema import RunConfig
from rlkit.types.errors import CheckpointError, ConfigError
from rlkit.types.fingerprints import merged
from rlkit.types.ranks import MetricSet

LENGTHS = [(3, 5), (10, 20), (2, 1), (7, 30)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def leave_megatron_groups():
    yield
    parallel_state.destroy_model_parallel()


def start(cfg: RunConfig, *, resume_from: Path | None = None) -> MegatronBackend:
    backend = MegatronBackend()
    backend.init(cfg, rank_of(cfg, 0, 1, 0), resume_from=resume_from)
    return backend


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_transformers(name, paths):
    cfg = megatron_config(paths[name], {}, max_tokens_per_gpu=512, rollout_temperature=0.7)
    backend = start(cfg)
    parts = backend._parts("be tested", BackendState.AWAKE)
    samples = make_samples(LENGTHS)
    for sample in samples:
        sample.loss_mask = [1] * sample.response_length
    (update,) = make_updates(samples, replace(cfg, rollout=replace(cfg.rollout, rollout_batch_size=2)))[0]
    micros = [micro_batch(batch, parts.ranks, cfg) for batch in update.micro_batches]
    scored = parts.trainer.score(parts.runnable, micros)
    model = AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float32)
    with torch.no_grad():
        wanted, _ = naive_log_probs(model, samples, 0.7, padded=False)
    for micro, logp_T in zip(micros, scored, strict=True):
        for number, sample in enumerate(micro.batch.sample_ids_S.tolist()):
            begin, end = micro.batch.cu_seqlens[number].item(), micro.batch.cu_seqlens[number + 1].item()
            found = logp_T[begin:end][samples[sample].prompt_length :]
            torch.testing.assert_close(found, wanted[sample], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_weights_pass_through_bit_for_bit(name, paths):
    sent = all_weights(start(megatron_config(paths[name], {})), 3000)
    stored = hf_tensors(paths[name])
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[key], value) for key, value in stored.items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2])
def test_every_tensor_of_the_checkpoint_has_one_place(name, stages, paths):
    architecture = read_architecture(paths[name])
    found = entries(architecture, deal_layers(architecture.num_layers, stages=stages))
    names = [piece.name for entry in found if not entry.is_copy for piece in entry.pieces]
    shapes = {piece.name: piece.shape for entry in found for piece in entry.pieces}
    stored = hf_tensors(paths[name])
    assert sorted(names) == sorted(stored)
    assert all(tuple(value.shape) == shapes[key] for key, value in stored.items())
    assert len({(entry.stage, entry.chunk, entry.path) for entry in found}) == len(found)


def test_heads_are_packed_by_key_head():
    """Two key heads of size 1 with two queries each."""
    query, key, value = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20]), torch.tensor([100, 200])
    packed = pack_heads([query, key, value], size=1, repeats=2)
    assert packed.tolist() == [1, 2, 10, 100, 3, 4, 20, 200]
    for part, back in zip([query, key, value], unpack_heads(packed, size=1, repeats=2), strict=True):
        assert torch.equal(part, back)


@pytest.mark.parametrize(
    "num_layers, stages, first, last, expected",
    [
        (8, 1, None, None, [8]),
        (8, 4, None, None, [2, 2, 2, 2]),
        (10, 4, 3, 1, [3, 3, 3, 1]),
        (61, 4, None, 13, [16, 16, 16, 13]),
    ],
)
def test_stages_get_the_layers_that_flags_say(num_layers, stages, first, last, expected):
    assert stage_sizes(num_layers, stages=stages, first=first, last=last) == expected
    dealt = deal_layers(num_layers, stages=stages, first=first, last=last)
    assert [len(chunk.layers) for chunk in dealt] == expected
    assert [layer for chunk in dealt for layer in chunk.layers] == list(range(num_layers))


def test_virtual_stages_are_dealt_in_turns():
    dealt = deal_layers(8, stages=2, chunks_per_stage=2)
    assert [(chunk.stage, chunk.index, list(chunk.layers)) for chunk in dealt] == [
        (0, 0, [0, 1]),
        (1, 0, [2, 3]),
        (0, 1, [4, 5]),
        (1, 1, [6, 7]),
    ]
    assert [chunk.is_first for chunk in dealt] == [True, False, False, False]
    assert [chunk.is_last for chunk in dealt] == [False, False, False, True]


QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    "change, told",
    [
        ({"model_type": "gpt2"}, "does not know model_type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_name(change, told):
    with pytest.raises(ConfigError, match=told):
        architecture_of(QWEN3 | change, "here")


@pytest.mark.parametrize(
    "config, theta, kind",
    [
        ({"rope_theta": 5e5}, 5e5, "default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, "default"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, "linear"),
    ],
)
def test_both_ways_of_writing_rotary_settings_are_read(config, theta, kind):
    rope = architecture_of(QWEN3 | config, "here").rope
    assert (rope.theta, rope.kind) == (theta, kind)


def two_steps(backend: Backend, cfg: RunConfig, *, first: int = 0) -> list[MetricSet]:
    return [
        backend.train(step, make_updates(make_samples(MIXED_LENGTHS, seed=step), cfg)[0])
        for step in range(first, first + 2)
    ]


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama3"])
def test_steps_are_those_of_fsdp(name, paths):
    cfg = megatron_config(paths[name], {}, entropy_coef=0.05, max_tokens_per_gpu=38, num_steps_per_rollout=2)
    ours, theirs = start(cfg), start_backend(cfg)
    for found, wanted in zip(two_steps(ours, cfg), two_steps(theirs, cfg), strict=True):
        for key in [key for key in wanted if key.startswith("train/")]:
            assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-4), key
    weights = all_weights(ours)
    for key, value in all_weights(theirs).items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=4e-4)


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ],
    ids=["selective", "uniform", "block"],
)
def test_recomputation_changes_nothing(name, recompute, paths):
    found, wanted = [], []
    for results, layout in ((found, recompute), (wanted, {})):
        cfg = megatron_config(paths[name], layout, max_tokens_per_gpu=38)
        backend = start(cfg)
        results.extend([*two_steps(backend, cfg), all_weights(backend)])
    for step in range(2):
        assert all(found[step][key] == wanted[step][key] for key in wanted[step] if key.startswith("train/"))
    assert all(torch.equal(found[2][key], value) for key, value in wanted[2].items())


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_goes_on_bit_for_bit(name, paths, tmp_path):
    cfg = megatron_config(paths[name], {}, max_tokens_per_gpu=38)
    backend = start(cfg)
    two_steps(backend, cfg)
    backend.save(1, tmp_path, hf_directory=None)
    live = merged([backend.fingerprint()])
    assert file_fingerprints(tmp_path) == live
    backend.sleep()
    backend.wake_up()
    metrics = two_steps(backend, cfg, first=2)
    resumed = MegatronBackend()
    report = resumed.init(cfg, rank_of(cfg, 0, 1, 0), resume_from=tmp_path)
    assert report.resumed_step == 1
    assert merged([resumed.fingerprint()]) == live
    for found, wanted in zip(two_steps(resumed, cfg, first=2), metrics, strict=True):
        assert all(found[key] == wanted[key] for key in wanted if key.startswith("train/"))
    weights = all_weights(resumed)
    assert all(torch.equal(weights[key], value) for key, value in all_weights(backend).items())


@pytest.mark.parametrize("saved_by", ["fsdp", "megatron"])
def test_either_backend_continues_what_the_other_saved(saved_by, paths, tmp_path):
    cfg = megatron_config(paths["qwen2"], {}, max_tokens_per_gpu=38)
    first = start_backend(cfg) if saved_by == "fsdp" else start(cfg)
    two_steps(first, cfg)
    first.save(1, tmp_path, hf_directory=None)
    second = start_backend if saved_by == "megatron" else start
    other = second(cfg, resume_from=tmp_path)
    assert merged([other.fingerprint()]) == merged([first.fingerprint()])
    for found, wanted in zip(two_steps(other, cfg, first=2), two_steps(first, cfg, first=2), strict=True):
        assert found["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-4)
        assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4)


def test_a_checkpoint_of_another_model_is_refused(paths, tmp_path):
    cfg = megatron_config(paths["qwen3"], {})
    start(cfg).save(0, tmp_path, hf_directory=None)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        start(megatron_config(paths["qwen3-deep"], {}), resume_from=tmp_path)


def test_bf16_parameters_follow_float32_main_ones(paths):
    """Steps far too small for bf16 add up."""
    cfg = megatron_config(paths["qwen3"], {}, dtype="bfloat16", lr=1e-6, weight_decay=0.0)
    backend = start(cfg)
    optimizer = backend._parts("be tested", BackendState.AWAKE).optimizer
    before = [segment.main.detach().clone() for segment in optimizer.segments]
    two_steps(backend, cfg)
    moved = sum(
        (segment.main - old).abs().sum().item() for segment, old in zip(optimizer.segments, before, strict=True)
    )
    assert moved > 0.0
    assert all(tensor.dtype == torch.bfloat16 for tensor in all_weights(backend).values())
