"""A random number depends on its purpose, round and index, and on nothing else."""

import itertools

import torch

from executor.draws import Draws, Purpose

PROMPT = (5, 6, 7)


def test_numbers_do_not_depend_on_order_or_batch() -> None:
    draws = Draws(0, PROMPT, 0)
    many = draws.uniforms(Purpose.BRANCH, 3, 24)
    draws.uniforms(Purpose.ACCEPT, 3, 7)
    assert torch.equal(draws.uniforms(Purpose.BRANCH, 3, 5), many[:5])
    assert torch.equal(Draws(0, PROMPT, 0).uniforms(Purpose.BRANCH, 3, 24), many)


def test_no_two_streams_share_a_number() -> None:
    keys = [Draws(seed, PROMPT, occurrence) for seed in (0, 1) for occurrence in (0, 1)] + [Draws(0, (5, 6), 0)]
    streams = [d.uniforms(p, r, 50) for d, p, r in itertools.product(keys, Purpose, (-1, 0, 1, 2))]
    numbers = torch.cat(streams)
    assert len(set(numbers.tolist())) == len(numbers)


def test_numbers_are_uniform() -> None:
    numbers = torch.cat([Draws(0, PROMPT, 0).uniforms(Purpose.ACCEPT, r, 4) for r in range(5000)])
    assert (numbers >= 0).all() and (numbers < 1).all()
    ordered = numbers.sort().values
    distance = (ordered - (torch.arange(len(numbers)) + 0.5) / len(numbers)).abs().max()
    assert distance < 2.2 / len(numbers) ** 0.5  # Kolmogorov-Smirnov: a uniform law fails this one time in 8,000
