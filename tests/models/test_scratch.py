"""Models that start without weights of their own: reproducible, sized by the cache, or copied from a teacher."""

import pytest
import torch

from kdtrain.errors import UsageError
from kdtrain.models.loading import load_student, load_teacher
from kdtrain.models.spec import ModelSpec
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder


def scratch(config=None, **values):
    return ModelSpec(name="s", config=SHAPES["llama"] if config is None else config, init="scratch", **values)


def student(spec, vocab_size=300, seed=0):
    return load_student(spec, vocab_size=vocab_size, seed=seed, device="cpu")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_weights_from_scratch_are_a_function_of_the_seed_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    first = student(scratch(), seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert equal(first, student(scratch(), seed=3).state_dict())
    assert not equal(first, student(scratch(), seed=4).state_dict())


def test_the_cache_decides_the_vocabulary_unless_the_configuration_does():
    assert student(scratch(), vocab_size=777).config.vocab_size == 777
    assert student(scratch(SHAPES["llama"] | {"vocab_size": 800}), vocab_size=777).config.vocab_size == 800


def test_a_vocabulary_as_large_as_qwens_is_made(monkeypatch):
    model = student(scratch(SHAPES["llama"] | {"hidden_size": 8}), vocab_size=151_936)
    assert model.get_output_embeddings().weight.shape == (151_936, 8)


def test_special_tokens_are_the_tokenizers_and_none_where_they_do_not_fit(tmp_path):
    tiny_tokenizer(400).save_pretrained(tmp_path)
    model = student(scratch(tokenizer=str(tmp_path)), vocab_size=400)
    assert (model.config.eos_token_id, model.config.bos_token_id) == (399, 399)
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (None, 399)
    assert student(scratch(tokenizer=str(tmp_path)), vocab_size=300).config.eos_token_id is None
    own = student(scratch(SHAPES["llama"] | {"eos_token_id": 5}, tokenizer=str(tmp_path)), vocab_size=400)
    assert own.config.eos_token_id == 5


def test_a_model_without_a_tokenizer_generates():
    for shape in ("llama", "gpt2", "gemma2"):
        tokens_BT = tiny_model(shape).eval().generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False)
        assert tokens_BT.shape == (1, 5)


@pytest.mark.parametrize(
    "config, line",
    [
        ({"model_type": "lama"}, "s: model_type 'lama' is not a causal LM of transformers; did you mean llama?"),
        ({"model_type": "vit"}, "s: model_type 'vit' is not a causal LM"),
        (SHAPES["llama"] | {"hidden_sise": 8}, "[config] hidden_sise is unknown to llama; did you mean hidden_size?"),
        (SHAPES["llama"] | {"hidden_size": "wide"}, "Field 'hidden_size' expected int"),
        (SHAPES["llama"] | {"hidden_size": 33}, "not a multiple of the number of attention heads"),
    ],
)
def test_an_impossible_configuration_is_refused_in_one_line(config, line):
    with pytest.raises(UsageError) as caught:
        student(scratch(config))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_old_and_renamed_entries_of_a_configuration_are_accepted():
    model = student(scratch(SHAPES["llama"] | {"rope_theta": 500.0}))
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert student(scratch(SHAPES["gpt2"] | {"hidden_size": 16})).config.n_embd == 16


def test_an_entry_that_only_the_code_of_a_model_reads_is_accepted_and_no_other():
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = student(scratch(SHAPES["llama"] | mixture | {"head_dim": 16}))
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 16
    with pytest.raises(UsageError, match=r"\[config\] head_dim is unknown to gpt2"):
        student(scratch(SHAPES["gpt2"] | {"head_dim": 16}))


def test_without_a_cache_the_configuration_must_state_the_size_of_the_vocabulary():
    with pytest.raises(UsageError, match=r"\[config\] has no vocab_size, which no cache gives"):
        student(scratch(), vocab_size=None)


@pytest.fixture(params=["llama", "gpt2", "gemma2", "qwen3"])
def teacher(request, tmp_path):
    model = tiny_model(request.param, seed=9, num_hidden_layers=4)
    write_model_folder(tmp_path / "teacher", model)
    return str(tmp_path / "teacher"), model


def layers_spec(folder, layers, config=None):
    return ModelSpec(name="s", init="teacher-layers", teacher=folder, layers=layers, config=config)


def test_chosen_layers_embeddings_norms_and_head_are_the_teachers(teacher):
    folder, model = teacher
    made = student(layers_spec(folder, (0, 3)))
    assert made.config.num_hidden_layers == 2
    given, got = model.state_dict(), made.state_dict()
    moved = {name: name.replace(".1.", ".3.", 1) for name in got}
    assert any(name != moved[name] for name in got)
    assert all(torch.equal(got[name], given[moved[name]]) for name in got)


def test_a_student_of_all_the_teachers_layers_is_the_teacher(teacher):
    folder, model = teacher
    tokens_BT = torch.arange(20)[None]
    made = student(layers_spec(folder, (0, 1, 2, 3))).eval()
    assert torch.equal(made(tokens_BT).logits, model.eval()(tokens_BT).logits)
    input_weight, output_weight = (get().weight for get in (made.get_input_embeddings, made.get_output_embeddings))
    assert (input_weight is output_weight) == model.config.tie_word_embeddings


def test_a_head_of_the_teachers_own_that_its_configuration_says_tied_is_copied_or_refused(tmp_path):
    teacher = tiny_model("llama")
    teacher.lm_head.weight = torch.nn.Parameter(torch.randn(300, 32))
    teacher.save_pretrained(tmp_path / "t")
    made = student(layers_spec(str(tmp_path / "t"), (0, 1)))
    assert torch.equal(made.lm_head.weight, teacher.lm_head.weight)
    assert torch.equal(made.model.embed_tokens.weight, teacher.model.embed_tokens.weight)
    with pytest.raises(UsageError, match="its output head is its embedding, and the teacher's is not; set tie"):
        student(layers_spec(str(tmp_path / "t"), (0, 1), SHAPES["llama"]))


def test_layers_keep_their_kind_of_attention(tmp_path):
    write_model_folder(tmp_path / "t", tiny_model("gemma2", num_hidden_layers=4))
    made = student(layers_spec(str(tmp_path / "t"), (1, 3)))
    assert made.config.layer_types == ["full_attention", "full_attention"]


@pytest.mark.parametrize(
    "layers, config, line",
    [
        ((0, 4), None, "layers = [0, 4], and"),
        (
            (0, 1),
            SHAPES["llama"] | {"hidden_size": 16},
            "model.embed_tokens.weight is [300, 16], the teacher has [300, 32]",
        ),
        ((0, 1), SHAPES["llama"] | {"num_hidden_layers": 3}, "layers names 2 and [config] has 3"),
        ((0, 1), SHAPES["gpt2"], "the teacher has no such weight"),
    ],
)
def test_layers_that_do_not_fit_are_refused(tmp_path, layers, config, line):
    write_model_folder(tmp_path / "t", tiny_model("llama", num_hidden_layers=4))
    with pytest.raises(UsageError) as caught:
        student(layers_spec(str(tmp_path / "t"), layers, config))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_random_teacher_is_frozen_and_in_its_dtype():
    spec = scratch(SHAPES["llama"] | {"vocab_size": 300}, dtype="bfloat16")
    model = load_teacher(spec, "cpu", seed=1)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
