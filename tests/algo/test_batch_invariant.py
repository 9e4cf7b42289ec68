"""The same bits alone, in any batch, and token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlkit.algo.batch_invariant import TILE, attend, in_tiles, make_batch_invariant, token_log_probs


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Rms(nn.Module):
    """Named as transformers' norms are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class TinyRMSNorm(Rms):
    pass


@pytest.mark.parametrize("features", [(48, 96), (33, 7), (576, 1536)])
def test_a_row_has_its_bits_whatever_stands_beside_it(features: tuple[int, int]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*features), nn.SiLU(), TinyRMSNorm(), nn.Linear(features[1], 5, bias=False))
    plain = [layer.forward for layer in model]
    rows = torch.randn(150, features[0])
    expected = model(rows)
    make_batch_invariant(model)
    assert all(layer.forward != before for layer, before in zip(model, plain, strict=True))
    whole = model(rows)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for first, count in ((0, 1), (149, 1), (3, 7), (60, 70), (10, 130)):
        assert torch.equal(model(rows[first : first + count]), whole[first : first + count])
    assert torch.equal(model(rows[:, None])[:, 0], whole)
    assert torch.equal(model(rows.view(2, 75, -1)).view(150, -1), whole)


def test_tiles_have_a_gradient(features: int = 6):
    weight = torch.randn(4, features, dtype=torch.float64)
    rows = torch.randn(TILE + 3, features, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: in_tiles(lambda tile: F.linear(tile, weight), x)[:5], (rows,))


@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_attention_of_a_token_is_that_inside_its_sequence(window: int | None, heads: tuple[int, int]):
    torch.manual_seed(1)
    length, size = 150, 12
    query = torch.randn(heads[0], length, size)
    key, value = torch.randn(2, heads[1], length, size).unbind(0)
    scale = size**-0.5
    whole = attend(query, key, value, start=0, scale=scale, window=window)
    positions = torch.arange(length)
    visible = positions[:, None] >= positions
    if window is not None:
        visible &= positions[:, None] - positions < window
    group = heads[0] // heads[1]
    expected = F.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0), attn_mask=visible, scale=scale
    )
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    dirty_key, dirty_value = (F.pad(x, (0, 0, 0, 50), value=1e30) for x in (key, value))
    for position in (0, 1, 63, 64, 65, 127, 128, 149):
        alone = attend(
            query[:, position : position + 1], dirty_key, dirty_value, start=position, scale=scale, window=window
        )
        if position == length - 1:
            assert torch.equal(alone[:, 0], whole[:, position])
        known_key, known_value = key[:, : position + 1], value[:, : position + 1]
        alone = attend(
            query[:, position : position + 1], known_key, known_value, start=position, scale=scale, window=window
        )
        assert torch.equal(alone[:, 0], whole[:, position]), position
    for start, stop in ((0, 10), (10, 100), (64, 128), (100, 150)):
        piece = attend(query[:, start:stop], key[:, :stop], value[:, :stop], start=start, scale=scale, window=window)
        assert torch.equal(piece, whole[:, start:stop])


def test_attention_has_a_gradient():
    torch.manual_seed(2)
    query = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    for window in (None, 2):
        run = lambda q, k, v, window=window: attend(q, k, v, start=0, scale=0.5, window=window)  # noqa: E731
        assert torch.autograd.gradcheck(run, (query, key, value))


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_log_probs_do_not_depend_on_the_batch(temperature: float | None):
    torch.manual_seed(3)
    logits, targets = torch.randn(150, 101), torch.randint(101, (150,))
    column = None if temperature is None else torch.full((150, 1), temperature)
    whole = token_log_probs(logits, targets, column)
    expected = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(whole, expected)
    for first, count in ((0, 1), (149, 1), (20, 100)):
        rows = slice(first, first + count)
        assert torch.equal(
            token_log_probs(logits[rows], targets[rows], None if column is None else column[rows]), whole[rows]
        )
