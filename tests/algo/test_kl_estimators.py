import math

import pytest
import torch
from algo_cases import case

from rlkit.algo.kl import token_kl


@pytest.mark.parametrize(
    ("kl_type", "expected"),
    [("k1", -0.4), ("k2", 0.08), ("k3", math.exp(0.4) - 1.4), ("low_var_kl", math.exp(0.4) - 1.4)],
)
def test_estimators_by_definition(kl_type: str, expected: float):
    """d = log p_ref - log p = 0.4."""
    logp, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-0.6], dtype=torch.float64)
    assert token_kl(logp, ref, kl_type=kl_type).item() == pytest.approx(expected, abs=1e-12)  # pyright: ignore


def test_k3_values_and_no_overflow():
    ls11 = case("ls-11")
    differences = torch.tensor(ls11["input"]["rows_ref_minus_logp"])
    logp = torch.full_like(differences, -3.0, requires_grad=True)
    for kl_type in ("k3", "low_var_kl"):
        kl = token_kl(logp, logp.detach() + differences, kl_type=kl_type)
        for value, expected in zip(kl.tolist(), ls11["expected"]["k3"], strict=True):
            if expected == "finite":
                assert math.isfinite(value)
            else:
                assert value == pytest.approx(expected, abs=ls11["tolerance"])
        (grad,) = torch.autograd.grad(kl.sum(), logp)
        assert grad.isfinite().all()


def test_low_var_kl_is_bounded():
    logp, ref = torch.tensor([-30.0]), torch.tensor([-1.0])
    assert token_kl(logp, ref, kl_type="low_var_kl").item() == 10.0
    assert token_kl(logp, ref, kl_type="k3").item() > 1e8


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    difference = 1e-4
    kl = token_kl(torch.tensor([-2.0]), torch.tensor([-2.0]) + difference, kl_type="k3").item()
    exact_difference = (torch.tensor(-2.0) + difference).double().item() + 2.0
    assert kl == pytest.approx(math.expm1(exact_difference) - exact_difference, rel=0.05)


def test_expectation_of_k1_and_k3_is_the_kl():
    """Sum over the whole vocabulary instead of sampling."""
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0)
    ref = torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0)
    true_kl = (logp.exp() * (logp - ref)).sum().item()
    for kl_type in ("k1", "k3"):
        estimate = (logp.exp() * token_kl(logp, ref, kl_type=kl_type)).sum().item()
        assert estimate == pytest.approx(true_kl, abs=1e-12)
