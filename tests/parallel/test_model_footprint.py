"""Sizes of models from their configurations alone, against the models themselves."""

from dataclasses import replace

import pytest
import torch
from transformers import dynamic_module_utils

from kdtrain.config.sections import LoraConfig
from kdtrain.errors import UsageError
from kdtrain.models.adapters import inject
from kdtrain.models.attention import CAUSAL
from kdtrain.models.spec import ModelSpec
from kdtrain.parallel import footprint, memory_plan
from kdtrain.parallel.footprint import footprint_of, model_footprint
from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder


def spec(shape: str, **config: object) -> ModelSpec:
    return ModelSpec(name=shape, config=SHAPES[shape] | config, init="scratch")


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_mixture_of_experts_is_measured_in_every_mode_without_a_word(mode, caplog):
    found = model_footprint(spec("llama", **MIXTURE), vocab_size=300, seq_len=8, mode=mode, trained=True)
    assert found.parameters == sum(each.numel() for each in tiny_model("llama", **MIXTURE).parameters())
    assert 0 < found.kept_by_checkpoints < found.kept and not caplog.records


def test_the_parameters_of_a_student_that_does_not_run_without_numbers_are_counted_all_the_same(monkeypatch):
    def refuses(*_):
        raise RuntimeError("tensors without numbers")

    monkeypatch.setattr(footprint, "_forward", refuses)
    student = spec("llama")
    assert footprint_of(student, vocab_size=300, trained=True, seq_len=8, mode="fp32") is None
    assert memory_plan.student_parameters(student, 300) == sum(each.numel() for each in tiny_model().parameters())


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gpt2", "gemma2", "phi"])
def test_parameters_layers_and_head_are_those_of_the_model(shape):
    found = model_footprint(spec(shape), vocab_size=300, seq_len=8, mode="fp32", trained=True)
    model = tiny_model(shape)
    head = model.get_output_embeddings().weight
    layers = max((each for each in model.modules() if isinstance(each, torch.nn.ModuleList)), key=len)
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert found.in_layers == sum(each.numel() for each in layers.parameters())
    assert (found.layers, found.vocabulary, found.width) == (2, 300, 32)
    assert found.tied == (head is model.get_input_embeddings().weight)
    assert 0 < found.kept_by_checkpoints < found.kept


@pytest.mark.parametrize("sequences, seq_len", [(1, 16), (4, 32)])
@pytest.mark.parametrize("shape", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_forward_keeps_as_many_bytes_as_autograd_keeps_of_the_real_model(mode, shape, sequences, seq_len):
    found = model_footprint(spec(shape), vocab_size=300, seq_len=seq_len, mode=mode, trained=True)
    model = tiny_model(shape)
    if shape != "gemma2":  # its soft cap needs a GPU
        model.set_attn_implementation(CAUSAL)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16"),
    ):
        model.base_model(input_ids=torch.zeros(sequences, seq_len, dtype=torch.int64), use_cache=False)
    real = sum(storage.nbytes() for storage in kept.values())
    assert found.kept * sequences * seq_len + found.kept_once == real


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_student_with_adapters_has_their_sizes_and_keeps_what_they_keep(shape):
    pytest.importorskip("peft")
    lora, model = LoraConfig(lora_rank=4, lora_layers=1), tiny_model(shape)
    found = model_footprint(replace(spec(shape), lora=lora), vocab_size=300, seq_len=16, mode="fp32", trained=True)
    whole = model_footprint(spec(shape), vocab_size=300, seq_len=16, mode="fp32", trained=True)
    inject(model, lora, seed=0)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert (found.trained, found.frozen, found.frozen_head) == (trained, whole.parameters, True)
    assert (whole.frozen, whole.frozen_head) == (0, False)
    assert found.frozen_in_layers == whole.in_layers and found.in_layers == whole.in_layers + trained
    assert found.kept < whole.kept
    named = [(name, each.numel()) for name, each in model.named_parameters() if ".lora_" in name]
    by_inputs = ("o_proj", "down_proj")  # of which A is cut, else B
    cut = sum(size for name, size in named if (".lora_A." in name) == any(each in name for each in by_inputs))
    assert found.part(2, None).trained == trained - (cut / 2 if shape == "llama" else 0)
    head = model_footprint(spec(shape), vocab_size=300, seq_len=16, mode="fp32", trained=True, freeze_head=True)
    assert head.frozen == model.get_output_embeddings().weight.numel() and head.frozen_head


@pytest.mark.parametrize("shape", ["mistral", "gemma2"])
def test_a_gpu_keeps_neither_scores_nor_masks_whatever_the_length(shape):
    def measured(seq_len, on_gpu):
        return model_footprint(spec(shape), vocab_size=300, seq_len=seq_len, mode="fp32", trained=True, on_gpu=on_gpu)

    short, long, on_cpu = measured(32, True), measured(128, True), measured(128, False)
    assert short.kept == long.kept
    assert long.kept_once < 4 * 128 * 128 < on_cpu.kept * 128 + on_cpu.kept_once - long.kept * 128


def test_a_large_model_costs_no_memory_and_little_time():
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    found = model_footprint(spec("llama", **large), vocab_size=128_256, seq_len=64, mode="bf16", trained=False)
    assert 6e9 < found.parameters < 9e9 and found.weight_bytes == 4


def test_a_teachers_weights_have_the_bytes_of_its_dtype_unless_it_runs_in_fp32(tmp_path):
    write_model_folder(tmp_path / "teacher", tiny_model("llama"), tiny_tokenizer())
    teacher = ModelSpec(name="t", source=str(tmp_path / "teacher"), dtype="bfloat16")
    sizes = [
        model_footprint(teacher, vocab_size=None, seq_len=8, mode=mode, trained=False) for mode in ("bf16", "fp32")
    ]
    assert [each.weight_bytes for each in sizes] == [2, 4]
    layers = ModelSpec(name="s", init="teacher-layers", teacher=str(tmp_path / "teacher"), layers=(1,))
    assert model_footprint(layers, vocab_size=None, seq_len=8, mode="fp32", trained=True).layers == 1


def test_an_impossible_configuration_is_refused():
    with pytest.raises(UsageError, match="model_type 'lama'"):
        model_footprint(spec("llama", model_type="lama"), vocab_size=300, seq_len=8, mode="fp32", trained=True)


def test_transformers_asks_nothing_on_stdin_while_a_model_is_measured(monkeypatch):
    seen = []

    def unknown(*arguments, **options):
        seen.append(dynamic_module_utils.TIME_OUT_REMOTE_CODE)
        raise ValueError("no such model")

    monkeypatch.setattr(footprint.AutoModelForCausalLM, "from_config", unknown)
    with pytest.raises(ValueError, match="no such model"):
        model_footprint(spec("llama"), vocab_size=300, seq_len=8, mode="fp32", trained=True)
    assert seen == [0] and dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0
