"""The CUDA half of the backend: attention kernels, bf16, sleep. Run by hand on a GPU host: `pytest -m gpu
tests/backends`.
"""

from pathlib import Path

import pytest
import torch
from fsdp_setup import (
    MIXED_LENGTHS,
    all_weights,
    make_config,
    make_samples,
    make_updates,
    parts_of,
    rank_info,
    start_backend,
    train_step,
)
from torch import Tensor
from transformers import AttentionInterface

from rlkit.backends.attention.op import NO_WINDOW, packed_attention
from rlkit.backends.attention.packed import PackedAttention, choose_attention, packed_layout
from rlkit.backends.fsdp.attention import register_attention
from rlkit.backends.fsdp.backend import FsdpBackend
from rlkit.backends.fsdp.compilation import num_compiled_graphs
from rlkit.backends.fsdp.model import local_shard, named_shards
from rlkit.backends.fsdp.trainer import micro_batch
from rlkit.config.schema import RunConfig
from rlkit.dist.groups import destroy_process_group

pytestmark = pytest.mark.gpu

LENGTHS = [3, 1, 170, 18, 400, 41, 2]


def start_on_gpu(cfg: RunConfig, resume_from: Path | None = None) -> FsdpBackend:
    backend = FsdpBackend()
    backend.init(cfg, rank_info(device="cuda"), resume_from=resume_from)
    return backend


def attend(kind: PackedAttention, inputs: list[Tensor], window: int | None) -> Tensor:
    register_attention()
    layout = packed_layout(torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32))
    layout = layout.to(torch.device("cuda", 0))
    function = AttentionInterface()[kind.value]
    return function(torch.nn.Module(), *inputs, None, packed_layout=layout, scaling=0.2, sliding_window=window)[0]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kind", [PackedAttention.FA2, PackedAttention.VARLEN, PackedAttention.SDPA])
def test_kernels_equal_the_reference(kind: PackedAttention, window: int | None):
    if kind is PackedAttention.FA2:
        pytest.importorskip("flash_attn.flash_attn_interface")
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 64) for heads in (8, 2, 2)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for which, dtype in ((kind, torch.bfloat16), (PackedAttention.REFERENCE, torch.float32)):
        inputs = [value.to("cuda", torch.bfloat16).to(dtype).requires_grad_() for value in values]
        out = attend(which, inputs, window)
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
        grads = torch.autograd.grad((out * pull).sum(), inputs)
        results.append([out.float(), *(grad.float() for grad in grads)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kind", [PackedAttention.FA2, PackedAttention.VARLEN, PackedAttention.SDPA])
def test_the_operator_of_compiled_blocks_equals_the_reference(kind: PackedAttention, window: int | None):
    if kind is PackedAttention.FA2:
        pytest.importorskip("flash_attn.flash_attn_interface")
    register_attention()
    layout = packed_layout(torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32))
    layout = layout.to(torch.device("cuda", 0))
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn((sum(LENGTHS), heads, 64), generator=generator) for heads in (8, 2, 2)]
    pull = torch.randn((sum(LENGTHS), 8, 64), generator=generator).to("cuda")
    results = []
    for which, dtype in ((kind, torch.bfloat16), (PackedAttention.REFERENCE, torch.float32)):
        inputs = [value.to("cuda", torch.bfloat16).to(dtype).requires_grad_() for value in values]
        width = NO_WINDOW if window is None else window
        out, _ = packed_attention(*inputs, layout.handle, which.value, 0.2, width)
        grads = torch.autograd.grad((out * pull.to(dtype)).sum(), inputs)
        results.append([out.float(), *(grad.float() for grad in grads)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_step_equals_an_eager_one(checkpoints: dict[str, Path], attention: str, checkpointing: bool):
    results, graphs = [], []
    for torch_compile in ("off", "on"):
        cfg = make_config(
            checkpoints["qwen3"],
            dtype="bfloat16",
            torch_compile=torch_compile,
            attn_implementation=attention,
            gradient_checkpointing=checkpointing,
            entropy_coef=0.1,
        )
        backend = start_on_gpu(cfg)
        metrics = []
        for step in range(3):
            metrics.append(train_step(backend, cfg, step))
            graphs.append(num_compiled_graphs())
        results.append(metrics)
    assert graphs[-1] - graphs[3] <= 1, "packs of other lengths must not be compiled anew"
    for eager, compiled in zip(*results, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert compiled[f"train/{name}"] == pytest.approx(eager[f"train/{name}"], rel=0.03, abs=0.03), name


def test_micro_batches_are_uploaded_without_waiting(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["qwen3"], dtype="bfloat16", max_tokens_per_gpu=38)
    backend = start_on_gpu(cfg)
    (update,) = make_updates(make_samples(MIXED_LENGTHS), cfg)[0]
    prepared = [micro_batch(batch, parts_of(backend).mesh) for batch in update.micro_batches]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = [micro.to(torch.device("cuda", 0)) for micro in prepared]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for micro, original in zip(moved, prepared, strict=True):
        assert torch.equal(micro.batch.tokens_T.cpu(), original.batch.tokens_T)


def test_sleep_tells_how_much_it_moved(checkpoints: dict[str, Path]):
    cfg = make_config(checkpoints["llama"], dtype="bfloat16")
    backend = start_on_gpu(cfg)
    train_step(backend, cfg, 0)
    optimizer = parts_of(backend).optimizer
    expected = sum(tensor.nbytes for tensor in optimizer.state_tensors())
    expected += sum(local_shard(shard).nbytes for _, shard in named_shards(parts_of(backend).policy))
    backend.sleep()
    assert torch.cuda.memory_reserved() < 2 * 1024**3
    backend.wake_up()
    metrics = train_step(backend, cfg, 1)
    assert metrics["sleep/num_bytes"] == metrics["wake/num_bytes"] == expected
    assert metrics["sleep/gb_per_s"] > 0 and "sleep/num_bytes" not in train_step(backend, cfg, 2)


def test_auto_takes_a_variable_length_kernel():
    chosen = choose_attention("auto", device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert chosen in (PackedAttention.FA2, PackedAttention.VARLEN)
    assert choose_attention("auto", device=torch.device("cuda", 0), dtype=torch.float32) is PackedAttention.SDPA


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_a_gpu_step_equals_a_cpu_step(checkpoints: dict[str, Path], dtype: str, tolerance: float):
    cfg = make_config(checkpoints["qwen3"], dtype=dtype, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.1)
    on_gpu = train_step(start_on_gpu(cfg), cfg)
    destroy_process_group()
    on_cpu = train_step(start_backend(make_config(checkpoints["qwen3"], entropy_coef=0.1)), cfg)
    for name in ("loss", "grad_norm", "entropy", "train_rollout_logprob_abs_diff"):
        expected = on_cpu[f"train/{name}"]
        assert on_gpu[f"train/{name}"] == pytest.approx(expected, rel=tolerance, abs=tolerance), name
    assert on_gpu["train/ppo_kl"] == on_gpu["train/kl_loss"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_frees_the_gpu_and_is_neutral(checkpoints: dict[str, Path], dtype: str):
    cfg = make_config(checkpoints["llama"], dtype=dtype, use_kl_loss=True, num_steps_per_rollout=2)
    backend = start_on_gpu(cfg)
    train_step(backend, cfg, 0)
    before, state = all_weights(backend), optimizer_state(backend)
    backend.sleep()
    tensors = [*(local_shard(s) for _, s in named_shards(parts_of(backend).policy))]
    tensors += list(parts_of(backend).optimizer.state_tensors())
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
    asleep = all_weights(backend, max_bytes=5000)
    assert all(torch.equal(asleep[name], before[name]) for name in before)
    backend.wake_up()
    woken, woken_state = all_weights(backend), optimizer_state(backend)
    assert all(torch.equal(woken[name], before[name]) for name in before)
    assert all(torch.equal(state[name], woken_state[name]) for name in state)
    train_step(backend, cfg, 1)


def optimizer_state(backend: FsdpBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in parts_of(backend).optimizer.sharded_state().items()}


def test_resume_on_a_gpu(checkpoints: dict[str, Path], tmp_path: Path):
    cfg = make_config(checkpoints["qwen3"], dtype="bfloat16")
    first = start_on_gpu(cfg)
    train_step(first, cfg, 0)
    first.save(0, tmp_path / "saved", hf_directory=tmp_path / "hf")
    second = start_on_gpu(cfg, resume_from=tmp_path / "saved")
    assert all(torch.equal(value, all_weights(second)[name]) for name, value in all_weights(first).items())
    state, resumed_state = optimizer_state(first), optimizer_state(second)
    assert state.keys() == resumed_state.keys()
    assert all(torch.equal(state[name], resumed_state[name]) for name in state)


def test_micro_batches_do_not_wait_for_the_gpu(checkpoints: dict[str, Path]):
    """Only the two reads at the end of an optimizer step and of the call may synchronise."""
    cfg = make_config(checkpoints["qwen3"], dtype="bfloat16", max_tokens_per_gpu=38)
    backend = start_on_gpu(cfg)
    (update,) = make_updates(make_samples(MIXED_LENGTHS), cfg)[0]
    backend.train(0, [update])
    parts = parts_of(backend)
    trainer = parts.trainer
    micro_batches = [micro_batch(batch, parts.mesh).to(torch.device("cuda", 0)) for batch in update.micro_batches]
    assert len(micro_batches) > 2
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._accumulate(micro_batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
