import pytest
import torch
from transformers import PreTrainedModel

from kdtrain.errors import UsageError
from kdtrain.models.head import split
from kdtrain.models.loading import checkpoint_activations
from kdtrain.testing import tiny_model

TOKENS_BT = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(5))


def hidden_and_gradients(model, compile=False):
    """Return the backbone's output, all gradients, and the bytes that its graph stores."""
    pieces = split(model).train()
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    backbone = torch.compile(pieces, backend="aot_eager") if compile else pieces
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backbone(TOKENS_BT)
    bytes_kept = sum(kept.values())
    hidden.square().sum().backward()
    return hidden, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}, bytes_kept


@pytest.mark.parametrize("shape", ["llama", "gemma2", "gpt2", "bloom"])
def test_gradients_are_bitwise_the_same_and_less_is_stored(shape):
    config = {"attn_pdrop": 0.1, "resid_pdrop": 0.1} if shape == "gpt2" else {}
    plain, checkpointed = tiny_model(shape, **config), tiny_model(shape, **config)
    checkpoint_activations(checkpointed)
    hidden, gradients, kept = hidden_and_gradients(plain)
    same, others, less = hidden_and_gradients(checkpointed)
    assert torch.equal(hidden, same) and gradients.keys() == others.keys()
    assert all(torch.equal(each, others[name]) for name, each in gradients.items())
    assert less < 0.8 * kept


def test_a_compiled_backbone_recomputes_too():
    plain, checkpointed = tiny_model(), tiny_model()
    checkpoint_activations(checkpointed)
    hidden, gradients, _ = hidden_and_gradients(plain)
    same, others, _ = hidden_and_gradients(checkpointed, compile=True)
    torch.testing.assert_close(hidden, same)
    for name, each in gradients.items():
        torch.testing.assert_close(each, others[name])


def test_a_model_that_cannot_recompute_is_refused(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "supports_gradient_checkpointing", False)
    model = tiny_model()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(UsageError, match="leave --activation-checkpointing out"):
        checkpoint_activations(model)
