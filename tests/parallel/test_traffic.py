"""Bytes of a step by formula, by hand for one layer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtrain.models.head import split
from kdtrain.parallel import parallelize, tensor
from kdtrain.testing import tiny_model

LAYER = [(6, 4), (4,)]
ROOT = [(10, 4)]


def test_ddp_sends_each_gradient_once_in_fp32():
    found = parallelize.ddp([*LAYER, *ROOT])
    assert found == parallelize.Traffic(all_reduce=4 * (24 + 4 + 40))
    assert found.sent(1, 4) == 2 * 3 / 4 * found.all_reduce


@pytest.mark.parametrize("micros", [1, 3])
def test_fsdp_gathers_layers_twice_and_the_root_once_a_micro_batch_and_scatters_once_a_step(micros):
    found = parallelize.fsdp([LAYER, LAYER], ROOT, sharing=2, micro_batches=micros, gathered=2)
    assert found.all_gather == micros * (2 * 2 * 2 * 28 + 4 * 40)
    assert found.reduce_scatter == 4 * (2 * 28 + 40)
    assert found.sent(2) == (found.all_gather + found.reduce_scatter) / 2


def test_gradients_that_are_added_up_in_shards_travel_with_each_micro_batch_and_between_copies_once():
    options = {"sharing": 2, "replicas": 2, "micro_batches": 3, "gathered": 4}
    found = parallelize.fsdp([LAYER], ROOT, accumulate="sharded", **options)
    whole = parallelize.fsdp([LAYER], ROOT, **options)
    assert found.reduce_scatter == 3 * whole.reduce_scatter
    assert (found.all_reduce, found.all_gather) == (whole.all_reduce, whole.all_gather)


def test_parts_are_padded_to_the_number_of_ranks():
    assert parallelize.padded((4,), 3) == 6
    assert parallelize.padded((6, 4), 3) == 24
    assert parallelize.padded((), 2) == 2


def test_copies_of_a_sharded_model_reduce_their_parts():
    found = parallelize.fsdp([LAYER], ROOT, sharing=2, replicas=2, micro_batches=1, gathered=4)
    assert found.all_reduce == 4 * (28 + 40) / 2


@pytest.mark.parametrize("world", [2, 4])
def test_a_quantised_student_is_quantised_in_each_layout_gathered_in_the_high_format_and_learns_as_a_whole_one(
    run_ranks, world
):
    run_ranks(Path(__file__).with_name("quantised_script.py"), world)


def test_ranks_that_share_a_head_of_keys_exchange_it_among_themselves():
    model, tokens = split(tiny_model("llama")), 10  # of two such heads
    model.tensor = SimpleNamespace(size=lambda: 4, get_local_rank=lambda: 0, get_group=lambda: None)
    how = {"micro_batches": 3, "sequence": True, "itemsize": 2, "recomputes": True}
    (_, every), (heads, sharing) = tensor.traffic(model, tokens, **how)
    assert (every, sharing) == (4, 2)
    numbers = 2 * 2 * tokens * 8  # keys and values of two layers, in a head of 8
    assert (heads.all_gather, heads.reduce_scatter) == (3 * 2 * 2 * numbers, 3 * 2 * numbers)
