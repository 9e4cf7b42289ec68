import pytest
import torch
from algo_cases import case
from torch import Tensor

from rlkit.algo.logprobs import chunked_log_probs, scored_positions


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, ...]:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def make_head(num_rows: int, *, hidden: int = 6, vocab: int = 11, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    return [rows, weight, bias, torch.randint(vocab, (num_rows,), generator=generator)]


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("through", ["logp", "entropy", "both"])
def test_chunked_equals_naive_with_gradients(chunk_size: int, temperature: float, with_bias: bool, through: str):
    rows, weight, bias, targets = make_head(13)
    inputs = [rows, weight] + [bias] * with_bias
    generator = torch.Generator().manual_seed(1)
    pull = [torch.randn(13, generator=generator) * (through in (name, "both")) for name in ("logp", "entropy")]
    results = []
    for chunked in (True, False):
        head_bias = bias if with_bias else None
        if chunked:
            logp, entropy = chunked_log_probs(
                rows, weight, targets, temperature=temperature, chunk_size=chunk_size, bias_V=head_bias
            )
        else:
            logp, entropy = naive(rows, weight, head_bias, targets, temperature)
        objective = {
            "logp": (logp * pull[0]).sum(),
            "entropy": (entropy * pull[1]).sum(),
            "both": (logp * pull[0]).sum() + (entropy * pull[1]).sum(),
        }[through]
        results.append([logp, entropy, *torch.autograd.grad(objective, inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bf16_logits_are_normalised_in_float32():
    rows, weight, _, targets = make_head(9, dtype=torch.bfloat16)
    logp, entropy = chunked_log_probs(rows, weight, targets, temperature=1.0, chunk_size=4)
    expected, expected_entropy = naive(rows, weight, None, targets, 1.0)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    logp.sum().backward()
    assert rows.grad is not None and rows.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    exact = torch.autograd.grad(naive(rows.float(), weight.float(), None, targets, 1.0)[0].sum(), weight)[0]
    torch.testing.assert_close(weight.grad.float(), exact.float(), rtol=0.05, atol=0.1)


def test_no_rows_give_zero_gradients():
    rows, weight, _, targets = make_head(0)
    logp, entropy = chunked_log_probs(rows, weight, targets, temperature=1.0, chunk_size=4)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert weight.grad is not None and weight.grad.abs().sum() == 0.0


def test_whole_logits_never_exist():
    """Every tensor that the function makes, forward and backward, has at most chunk_size * V or N * D or V * D
    elements.
    """
    num_rows, hidden, vocab, chunk_size = 64, 2, 50, 8
    rows, weight, _, targets = make_head(num_rows, hidden=hidden, vocab=vocab)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor))
            return out

    with Watch():
        logp, entropy = chunked_log_probs(rows, weight, targets, temperature=0.9, chunk_size=chunk_size)
        (logp.sum() + entropy.sum()).backward()
    assert max(sizes) <= chunk_size * vocab < num_rows * vocab


def test_temperature_is_applied_before_the_softmax():
    lp01 = case("lp-01")
    logits = torch.tensor([lp01["input"]["logits"]], dtype=torch.float32)
    target = torch.tensor([lp01["input"]["token"]])
    for temperature, expected in zip(lp01["input"]["temperatures"], lp01["expected"]["logprob"], strict=True):
        logp, _ = chunked_log_probs(logits, torch.eye(3), target, temperature=temperature, chunk_size=1)
        assert logp.item() == pytest.approx(expected, abs=lp01["tolerance"])


def test_tokens_are_scored_by_the_row_before_inside_their_sample():
    lp02 = case("lp-02")
    tokens_T = torch.tensor(lp02["input"]["packed_tokens"])
    cu_seqlens = torch.tensor(lp02["input"]["cu_seqlens"], dtype=torch.int32)
    rows_TV = torch.tensor(lp02["input"]["softmax_rows_per_position"]).log()
    mask_T = torch.zeros(len(tokens_T), dtype=torch.bool)
    ends = cu_seqlens.tolist()
    for start, end, prompt in zip(ends, ends[1:], lp02["input"]["prompt_lengths"], strict=False):
        mask_T[start + prompt : end] = True
    scored_N = scored_positions(mask_T, cu_seqlens)
    logp_N, _ = chunked_log_probs(
        rows_TV[scored_N - 1], torch.eye(3), tokens_T[scored_N], temperature=1.0, chunk_size=2
    )
    expected = [value for sample in lp02["expected"]["response_logprobs"] for value in sample]
    assert logp_N.tolist() == pytest.approx(expected, abs=lp02["tolerance"])


def test_labels_never_come_from_the_next_sample():
    example = case("lp-02")["input"]["label_example"]
    tokens_T = torch.tensor(example["tokens"])
    cu_seqlens = torch.tensor(example["cu_seqlens"], dtype=torch.int32)
    everything_but_first = torch.ones(len(tokens_T), dtype=torch.bool)
    everything_but_first[cu_seqlens[:-1].long()] = False
    scored_N = scored_positions(everything_but_first, cu_seqlens)
    label_of_row = dict(zip((scored_N - 1).tolist(), tokens_T[scored_N].tolist(), strict=True))
    labels = [label_of_row.get(row) for row in range(len(tokens_T))]
    assert labels == case("lp-02")["expected"]["next_token_labels"]


def test_the_first_token_of_a_sample_cannot_be_scored():
    with pytest.raises(AssertionError, match="first token"):
        scored_positions(torch.tensor([False, True, True]), torch.tensor([0, 2, 3], dtype=torch.int32))
