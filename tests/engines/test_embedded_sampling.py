import torch

from rlkit.engines.embedded.sampling import SamplingBatch, inverse_cdf, sample, uniform_numbers
from rlkit.types.generation import SamplingParams

CPU = torch.device("cpu")


def run(logits: torch.Tensor, rows: list[SamplingParams], *, seed: int = 0) -> tuple[list[int], list[float]]:
    batch = SamplingBatch.build(rows, vocab_size=logits.shape[1], device=CPU)
    uniform = torch.from_numpy(uniform_numbers(range(seed, seed + len(rows)), [5] * len(rows)))
    tokens, logprobs = sample(logits, batch, uniform)
    return tokens.tolist(), logprobs.tolist()


def frequencies(logits: torch.Tensor, params: SamplingParams, *, count: int = 15_000) -> torch.Tensor:
    """How often each id is drawn for one row of logits, over many seeds."""
    tokens, _ = run(logits.expand(count, -1), [params] * count)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[1]) / count


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position():
    numbers = torch.from_numpy(uniform_numbers(range(20_000), [7] * 20_000))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=20, min=0, max=1)
    assert (counts - 1000).abs().max() < 150  # 4.9 standard deviations
    assert uniform_numbers([1], [2]) != uniform_numbers([1], [3])
    assert uniform_numbers([1], [2]) != uniform_numbers([2], [2])
    assert uniform_numbers([2**63 - 1, -1], [0, 0]).tolist() == uniform_numbers([2**63 - 1, 2**64 - 1], [0, 0]).tolist()


def test_draws_follow_the_softmax_at_any_temperature():
    torch.manual_seed(0)
    logits = torch.randn(1, 300) * 2
    for temperature in (0.5, 1.0, 1.7):
        drawn = frequencies(logits, SamplingParams(temperature=temperature))
        expected = (logits[0] / temperature).softmax(-1)
        assert (drawn - expected).abs().max() < 0.015


def test_logprobs_are_log_softmax_over_temperature_whatever_is_filtered():
    torch.manual_seed(1)
    logits = torch.randn(4, 50) * 3
    rows = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=0.0),
    ]
    tokens, logprobs = run(logits, rows)
    for row, temperature in enumerate([0.7, 1.3, 1.0, 1.0]):  # greedy counts as temperature 1
        expected = (logits[row] / temperature).log_softmax(-1)[tokens[row]]
        torch.testing.assert_close(torch.tensor(logprobs[row]), expected)


def test_greedy_takes_the_largest_logit():
    logits = torch.randn(3, 20)
    tokens, _ = run(logits, [SamplingParams(temperature=0.0)] * 3)
    assert tokens == logits.argmax(-1).tolist()


def obvious_filter(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Top-k, top-p and min-p one token at a time, each on the unrestricted probabilities."""
    kept = torch.zeros_like(probs)
    before = 0.0
    for rank, token in enumerate(probs.argsort(descending=True).tolist()):
        is_in_top_k = params.top_k == -1 or rank < params.top_k
        if is_in_top_k and before <= params.top_p and probs[token] >= params.min_p * probs.max():
            kept[token] = probs[token]
        before += float(probs[token])
    return kept / kept.sum()


def test_filters_leave_what_the_obvious_loop_leaves():
    torch.manual_seed(2)
    logits = torch.randn(1, 64) * 1.5
    for params in (
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.7, min_p=0.05),
        SamplingParams(top_k=1),
    ):
        expected = obvious_filter((logits[0] / params.temperature).softmax(-1), params)
        drawn = frequencies(logits, params)
        assert ((drawn > 0) <= (expected > 0)).all(), params
        assert (drawn - expected).abs().max() < 0.02, params


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    torch.manual_seed(3)
    logits = torch.randn(6, 600)
    rows = [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.4),
        SamplingParams(temperature=0.0),
        SamplingParams(min_p=0.5, temperature=2.0),
    ]
    together, logprobs = run(logits, rows)
    for index, params in enumerate(rows):
        alone, logprob = run(logits[index : index + 1], [params], seed=index)
        assert alone == [together[index]]
        torch.testing.assert_close(logprob[0], logprobs[index])


def test_inverse_cdf_reaches_every_entry_and_never_one_of_weight_zero():
    weights = torch.zeros(1, 1000)
    weights[0, [0, 255, 256, 700]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    edges = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 1.0 - 2**-53], dtype=torch.float64)
    found = inverse_cdf(weights.expand(len(edges), -1), edges).tolist()
    assert found == [0, 0, 255, 255, 256, 256, 700, 700]


def test_a_share_below_the_resolution_of_float32_near_one_is_reached():
    weights = torch.full((1, 512), 1e-9)
    weights[0, 0] = 1.0
    assert inverse_cdf(weights, torch.tensor([1.0 - 2**-53], dtype=torch.float64)).tolist() == [511]


def test_nan_logits_give_nan_logprobs_and_a_valid_id():
    tokens, logprobs = run(torch.full((1, 300), torch.nan), [SamplingParams()])
    assert 0 <= tokens[0] < 300
    assert logprobs[0] != logprobs[0]
