"""A mixture of experts as student: the router's auxiliary loss is that of transformers, and a metric."""

import pytest
import torch

import kdtrain as kd
from kdtrain.models.loading import active_parameters
from kdtrain.testing import SHAPES, tiny_model

MIXTURES = {
    "qwen3_moe": SHAPES["llama"] | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": SHAPES["llama"] | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def mixture(kind, **more):
    return tiny_model("llama", 300, **MIXTURES[kind] | {"model_type": kind, "router_aux_loss_coef": 0.3} | more)


def batch(seed=0):
    tokens = torch.randint(0, 300, (3, 17), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "loss_mask": torch.ones(3, 16, dtype=torch.bool)}


@pytest.mark.parametrize("kind", MIXTURES)
def test_loss_and_gradients_are_those_of_transformers_with_the_configurations_coefficient(kind):
    ours, theirs = mixture(kind), mixture(kind)
    student = kd.Student(ours, kd.DistillationLoss(alpha=0.0))
    found = student(**batch())
    found.loss.backward()
    tokens = batch()["tokens"]
    output = theirs(input_ids=tokens[:, :-1], output_router_logits=True)
    entropy = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
    (entropy + 0.3 * output.aux_loss).backward()
    assert output.aux_loss > 0.5
    assert found.loss.item() == pytest.approx((entropy + 0.3 * output.aux_loss).item(), rel=1e-5)
    assert (found.router / found.tokens).item() == pytest.approx(output.aux_loss.item(), rel=1e-5)
    assert (found.ce / found.tokens).item() == pytest.approx(entropy.item(), rel=1e-5)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-4, atol=1e-6), name


def test_a_dense_student_and_one_whose_coefficient_is_0_have_none_and_evaluation_leaves_it_out():
    for model in (tiny_model("qwen3", 300), mixture("qwen3_moe", router_aux_loss_coef=0.0)):
        output = kd.Student(model, kd.DistillationLoss(alpha=0.0))(**batch())
        assert output.router == 0 and output.loss.item() == pytest.approx((output.ce / output.tokens).item())
    output = kd.Student(mixture("qwen3_moe"), kd.DistillationLoss(alpha=0.0)).eval()(**batch())
    assert output.router == 0 and output.loss.item() == pytest.approx((output.ce / output.tokens).item())


def test_the_active_parameters_are_those_of_the_experts_of_a_token():
    dense, mixed = tiny_model("qwen3", 300), mixture("qwen3_moe")
    assert active_parameters(dense) == sum(each.numel() for each in dense.parameters())
    experts = sum(each.numel() for name, each in mixed.named_parameters() if ".experts." in name)
    assert experts and active_parameters(mixed) == sum(each.numel() for each in mixed.parameters()) - experts // 2
