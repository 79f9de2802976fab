"""The split into backbone and output head: proven for known heads, refused with a reason for others."""

import pytest
import torch
from torch import nn

from kdtrain.errors import UsageError
from kdtrain.models.head import default_probe, split
from kdtrain.models.loading import load_student
from kdtrain.models.output_head import HeadPart
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.loss import DistillationLoss
from kdtrain.testing import SHAPES, tiny_model
from kdtrain.training.student import Student

TOKENS_BT = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(5))
LARGE_LOGIT = 60.0
BERT = ModelSpec(
    name="bert",
    init="scratch",
    config={"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
)


def enlarged(model):
    """Enlarge the weights until the logits of a soft-capped head reach its cap."""
    with torch.no_grad():
        largest = model(TOKENS_BT).logits.abs().max()
        model.get_output_embeddings().weight.mul_(LARGE_LOGIT / largest)
    return model


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_head_of_backbone_is_the_model_also_for_large_logits(shape):
    model = tiny_model(shape, tie_word_embeddings=False).eval()
    pieces = split(model)
    assert (pieces.fused, pieces.reason) == (True, "")
    enlarged(model)
    hidden_BTD = pieces(TOKENS_BT)
    assert hidden_BTD.shape == (2, 24, 32)
    expected_BTV = model(TOKENS_BT).logits
    assert expected_BTV.abs().max() > 20
    torch.testing.assert_close(pieces.head(hidden_BTD), expected_BTV, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "shape, config, scale, softcap",
    [
        ("llama", {}, 1.0, None),
        ("cohere", {}, 0.0625, None),
        ("granite", {}, 0.125, None),
        ("gemma2", {}, 1.0, 30.0),
        ("gemma2", {"final_logit_softcapping": None}, 1.0, None),
        ("gemma2", {"final_logit_softcapping": 5.0}, 1.0, 5.0),
        ("llama", {"logits_scaling": 8.0}, 1.0, None),
        ("llama", {"final_logit_softcapping": 100.0}, 1.0, None),
    ],
)
def test_the_form_of_the_head_is_the_one_the_model_computes(shape, config, scale, softcap):
    model = tiny_model(shape)
    for key, value in config.items():
        setattr(model.config, key, value)
    head = split(model).head
    assert (head.scale, head.softcap) == (scale, softcap)


def test_the_head_has_the_live_parameters_bias_included():
    model = tiny_model("phi")
    head = split(model).head
    assert head.weight is model.lm_head.weight and head.bias is model.lm_head.bias
    tied = tiny_model("llama")
    assert split(tied).head.weight is tied.model.embed_tokens.weight


def test_gradients_through_the_pieces_are_those_of_the_model():
    model = tiny_model("gemma2").eval()
    pieces = split(model)
    model(TOKENS_BT).logits.logsumexp(-1).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    pieces.logits(TOKENS_BT).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


class Shifted(nn.Linear):
    """A head that is more than a matrix product."""

    def forward(self, hidden):
        return super().forward(hidden) + 1.0


class Opaque(nn.Module):
    """A head that has no weight."""

    def __init__(self, linear):
        super().__init__()
        self.inner = linear

    def forward(self, hidden):
        return self.inner(hidden)


def with_a_shifted_head():
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.__class__ = Shifted
    return model


def with_an_opaque_head():
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head = Opaque(model.lm_head)
    return model


def with_a_backbone_that_fails_alone():
    model = tiny_model("llama")
    inner, whole = model.model.forward, model.forward
    calls = []

    def only_within(*args, **keywords):
        if not calls:
            raise RuntimeError("first line\nsecond line")
        return inner(*args, **keywords)

    def outer(*args, **keywords):
        calls.append(1)
        try:
            return whole(*args, **keywords)
        finally:
            calls.pop()

    model.model.forward, model.forward = only_within, outer
    return model


@pytest.mark.parametrize(
    "make, reason",
    [
        (with_a_shifted_head, "no known form of output head gives the logits of LlamaForCausalLM"),
        (with_an_opaque_head, "no known form of output head gives the logits of LlamaForCausalLM"),
        (with_a_backbone_that_fails_alone, "LlamaForCausalLM: RuntimeError: first line second line"),
    ],
)
def test_a_model_whose_head_cannot_be_proven_stays_whole_with_a_reason(make, reason):
    model = make().eval()
    pieces = split(model)
    assert (pieces.fused, pieces.reason) == (False, reason)
    torch.testing.assert_close(pieces(TOKENS_BT), model(TOKENS_BT).logits)
    assert pieces.head == HeadPart() and pieces.head(TOKENS_BT) is TOKENS_BT


def test_a_model_that_looks_ahead_is_refused():
    with pytest.raises(UsageError, match="BertLMHeadModel looks at later tokens"):
        split(load_student(BERT, vocab_size=300, seed=0, device="cpu"))


def test_a_padded_vocabulary_is_kept():
    model = tiny_model("llama", vocab_size=320).eval()
    head, hidden_BTD = split(model).head, model.model(TOKENS_BT).last_hidden_state
    torch.testing.assert_close(head(hidden_BTD), model(TOKENS_BT).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["llama", "gemma2", "gpt2"])
def test_a_model_in_half_precision_splits_too(shape, dtype):
    pieces = split(tiny_model(shape).to(dtype))
    assert pieces.fused and pieces.separates_documents


def test_splitting_does_not_change_weights_mode_or_random_state():
    model = tiny_model("gpt2", resid_pdrop=0.5)
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    pieces = split(model)
    assert pieces.fused and [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.get_output_embeddings()._forward_hooks


def test_the_state_dict_has_the_names_of_transformers_under_model():
    model = tiny_model("qwen3")
    assert list(split(model).state_dict()) == [f"model.{name}" for name in model.state_dict()]


def test_nothing_is_cached_between_calls():
    pieces = split(tiny_model("llama").eval())
    assert pieces.model.config.use_cache
    calls = []
    pieces.model.model.register_forward_hook(lambda module, inputs, output: calls.append(output))
    pieces(TOKENS_BT)
    assert calls[0].past_key_values is None


def test_the_probe_is_fixed_and_within_the_vocabulary():
    model = tiny_model("llama", vocab_size=11)
    assert torch.equal(default_probe(model), default_probe(model))
    assert default_probe(model).shape == (2, 16) and default_probe(model).max() < 11


_TARGETS = {"r": 4, "target_modules": ["q_proj"]}
_KINDS = {
    "in the layers": ("LoraConfig", _TARGETS),
    "biases": ("LoraConfig", _TARGETS | {"bias": "all"}),
    "head": ("LoraConfig", {"r": 4, "target_modules": ["lm_head"]}),
    "head and layers": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "lm_head"]}),
    "DoRA head": ("LoraConfig", {"r": 4, "target_modules": ["lm_head"], "use_dora": True}),
    "embedding": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens"]}),
    "embedding and head": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "lm_head"]}),
    "whole head": ("LoraConfig", _TARGETS | {"modules_to_save": ["lm_head"]}),
    "whole embedding": ("LoraConfig", _TARGETS | {"modules_to_save": ["embed_tokens"]}),
    "whole ends": ("LoraConfig", _TARGETS | {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tokens beside LoRA": ("LoraConfig", _TARGETS | {"trainable_token_indices": [5, 7]}),
    "tokens of the head": ("LoraConfig", _TARGETS | {"trainable_token_indices": {"lm_head": [5, 7]}}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [5, 7]}),
    "IA3 head": ("IA3Config", {"target_modules": ["lm_head"], "feedforward_modules": []}),
    "LoHa head": ("LoHaConfig", {"r": 4, "target_modules": ["lm_head"]}),
    "LoKr head": ("LoKrConfig", {"r": 4, "target_modules": ["lm_head"]}),
    "prefix": ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
    "prompt": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}),
}
_WHOLE = {"head", "head and layers", "DoRA head", "embedding and head", "tokens of the head", "prefix", "prompt"}
_WHOLE |= {"IA3 head", "LoHa head", "LoKr head"}
_WHOLE_IF_TIED = {"embedding", "tokens", "tokens beside LoRA"}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.filterwarnings("ignore")
def test_every_part_of_an_adapter_gets_the_gradient_of_the_models_own_product(kind, tied):
    peft = pytest.importorskip("peft")
    name, options = _KINDS[kind]
    torch.manual_seed(0)
    base = tiny_model("llama", 300, seed=3, tie_word_embeddings=tied).eval()
    model = peft.get_peft_model(base, getattr(peft, name)(**options)).eval()
    student = Student(model, DistillationLoss(alpha=0.0))
    assert student.model.fused == (kind not in _WHOLE and not (tied and kind in _WHOLE_IF_TIED))
    trained = [each for each in model.parameters() if each.requires_grad]
    student(tokens=TOKENS_BT, loss_mask=torch.ones_like(TOKENS_BT[:, 1:], dtype=torch.bool)).loss.backward()
    ours = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    logits_BTV = model(input_ids=TOKENS_BT[:, :-1]).logits[:, -(TOKENS_BT.shape[1] - 1) :]
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), TOKENS_BT[:, 1:].flatten())
    theirs = torch.autograd.grad(loss, trained, allow_unused=True)
    for own, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(own, torch.zeros_like(own) if expected is None else expected, rtol=1e-4, atol=1e-7)
