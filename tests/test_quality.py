"""KL divergence and top-1 agreement of whole distributions."""

import math

import pytest

from agentcache.quality import kl_divergence, top1_agrees


def logs(**probabilities):
    return {i: math.log(p) if p else -math.inf for i, p in enumerate(probabilities.values())}


def test_kl_is_zero_for_equal_distributions():
    p = logs(a=0.7, b=0.2, c=0.1)
    assert kl_divergence(p, dict(reversed(p.items()))) == 0


def test_kl_is_that_of_the_formula():
    p, q = logs(a=0.5, b=0.5), logs(a=0.9, b=0.1)
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert kl_divergence(p, q) == pytest.approx(expected)
    assert kl_divergence(p, q) != pytest.approx(kl_divergence(q, p))


def test_a_token_without_mass_adds_nothing():
    assert kl_divergence(logs(a=1.0, b=0.0), logs(a=0.5, b=0.5)) == pytest.approx(math.log(2))


def test_partial_distributions_are_refused():
    with pytest.raises(ValueError, match="logprobs=-1"):
        kl_divergence({0: -0.1, 1: -3.0}, {0: -0.1, 2: -3.0})


def test_top1():
    assert top1_agrees(logs(a=0.6, b=0.4), logs(a=0.51, b=0.49))
    assert not top1_agrees(logs(a=0.6, b=0.4), logs(a=0.4, b=0.6))
