"""Sample texts: the same samples each time, and no other random number changes."""

import random

import numpy as np
import torch

from kdtrain.models.generate import generate

VOCABULARY = 11


def counting(tokens_BT):
    """Return logits that prefer the token after the last one."""
    return 20.0 * torch.nn.functional.one_hot((tokens_BT[:, -1] + 1) % VOCABULARY, VOCABULARY).float()


def even(tokens_BT):
    return torch.zeros(len(tokens_BT), VOCABULARY)


def text(next_logits, prompts, tokens, temperature, seed=0):
    return torch.stack([*generate(next_logits, prompts, tokens, temperature, seed)], 1)


def test_the_greedy_text_takes_the_most_likely_token_each_time():
    greedy = text(counting, torch.tensor([[3, 4], [8, 9]]), 4, 0.0)
    assert greedy.tolist() == [[5, 6, 7, 8], [10, 0, 1, 2]]


def test_the_sampled_text_follows_the_distribution_and_the_seed():
    prompts = torch.zeros(200, 1, dtype=torch.int64)
    first, again, other = (text(even, prompts, 20, 1.0, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    shares = torch.bincount(first.flatten(), minlength=VOCABULARY) / first.numel()
    assert (shares - 1 / VOCABULARY).abs().max() < 0.02


def test_no_random_number_of_the_training_is_drawn():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    text(even, torch.zeros(2, 3, dtype=torch.int64), 5, 1.0)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
