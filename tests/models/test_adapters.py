"""Adapters: which layers have them, that they change nothing at first, and that `peft` and a merge agree with them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdtrain.config.sections import LoraConfig
from kdtrain.errors import UsageError
from kdtrain.models import adapters
from kdtrain.models.export import export_model
from kdtrain.models.head import SplitModel, split
from kdtrain.testing import tiny_model

peft = pytest.importorskip("peft")
TOKENS = torch.arange(24).reshape(2, 12)
KINDS = {
    "lora": {},
    "rslora": {"lora_rslora": True},
    "dora": {"lora_dora": True},
    "two layers": {"lora_targets": "q_proj,v_proj", "lora_layers": 1},
}


def adapted(shape: str = "llama", moved: bool = True, seed: int = 0, **options) -> SplitModel:
    """Make a student with adapters, by default with adapters that change its output."""
    student = split(tiny_model(shape, 300, seed=3))
    adapters.restrict(student, LoraConfig(**{"lora_rank": 4} | options), freeze_head=False, seed=seed)
    generator = torch.Generator().manual_seed(1)
    for parameter in student.parameters():
        if moved and parameter.requires_grad:
            parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    return student.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("shape", ["llama", "gpt2", "qwen3"])
def test_a_student_with_fresh_adapters_computes_what_its_base_does(shape):
    base = tiny_model(shape, 300, seed=3).eval()
    student = adapted(shape, moved=False)
    assert student.fused
    assert torch.equal(logits(student.model), logits(base))
    kept = {name.replace(".base_layer.", "."): each for name, each in student.model.state_dict().items()}
    assert all(torch.equal(kept[name], each) for name, each in base.state_dict().items())
    trained = {name for name, each in student.named_parameters() if each.requires_grad}
    names = {*student.state_dict()}
    assert trained == {name for name in names if ".lora_" in name} == names - student.frozen


def test_the_adapters_of_one_seed_are_the_same_and_the_random_state_stays():
    before = torch.get_rng_state()
    one, same, other = (adapted(moved=False, seed=seed).state_dict() for seed in (5, 5, 6))
    name = next(name for name in one if "lora_A" in name)
    assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "options, layers",
    [
        ({}, {f"model.layers.{n}.{each}" for n in (0, 1) for each in ("self_attn.q_proj", "mlp.up_proj")}),
        ({"lora_layers": 1}, {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}),
        ({"lora_targets": "q_proj"}, {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        ({"lora_targets": r".*\.0\..*_proj"}, {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.gate_proj"}),
    ],
)
def test_the_options_choose_the_layers_and_never_the_head(options, layers):
    found = {*adapters.adapted(adapted(moved=False, **options).model)}
    assert layers <= found
    assert "lm_head" not in found
    if "lora_layers" in options:
        assert all(".1." in name for name in found)
    if options.get("lora_targets") == "q_proj":
        assert found == layers


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lora_targets": "q_proj,nothing"}, "no linear layer 'nothing'; it has down_proj, gate_proj"),
        ({"lora_targets": "lm_head"}, "the output head cannot have an adapter"),
        ({"lora_targets": ".*"}, "the output head cannot have an adapter"),
        ({"lora_targets": "(never)"}, "matches no linear layer"),
        ({"lora_layers": 3}, "--lora-layers 3 is more than the 2 layers"),
        ({"lora_rank": 10**12}, "--lora-rank 1000000000000 is more than the 64 numbers"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused(options, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        adapted(**options)


BROKEN = "([", "a,,b", "a{99999999999}", "(" * 4000 + ")" * 4000, "a*" * 6000


@pytest.mark.parametrize("options", [*({"lora_targets": each} for each in BROKEN), {"lora_rank": 0}])
def test_options_that_are_none_are_refused(options):
    with pytest.raises(UsageError, match="lora"):
        LoraConfig(**{"lora_rank": 4} | options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_the_merged_model_equals_base_plus_adapter(shape, kind, tmp_path):
    if shape == "gpt2" and kind == "two layers":
        pytest.skip("gpt2 has no q_proj")
    student = adapted(shape, **KINDS[kind])
    export_model(student, None, tmp_path / "merged")
    merged = type(student.model).from_pretrained(tmp_path / "merged").eval()
    assert [name for name in merged.state_dict() if "lora" in name] == []
    assert (logits(merged) - logits(student.model)).abs().max() < 1e-6
    assert (logits(merged) - logits(tiny_model(shape, 300, seed=3).eval())).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_adapter_and_so_do_we(kind, tmp_path):
    student = adapted(**KINDS[kind])
    adapters.write_adapter(student.model, student.lora, "base", tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama", 300, seed=3), tmp_path).eval()
    assert torch.equal(logits(loaded), logits(student.model))
    again = adapters.read_adapter(tmp_path)
    other = split(tiny_model("llama", 300, seed=3)).eval()
    adapters.restrict(other, again, freeze_head=False, seed=9)
    adapters.fill_adapter(other.model, tmp_path)
    assert torch.equal(logits(other.model), logits(student.model))
    assert other.frozen == student.frozen


def test_an_adapter_that_overflows_in_a_dtype_is_not_written_in_it(tmp_path):
    student = adapted()
    base, own = (next(each for name, each in student.named_parameters() if part in name) for part in ("norm", "lora_A"))
    base.data[0] = 1e5  # which is not written
    adapters.write_adapter(student.model, student.lora, "base", tmp_path, "float16")
    own.data[0, 0] = 1e5
    with pytest.raises(UsageError, match=r"lora_A.weight has numbers up to 1e\+05, and float16 ends at 65504"):
        adapters.write_adapter(student.model, student.lora, "base", tmp_path, "float16")


def test_an_adapter_that_peft_wrote_is_read(tmp_path):
    config = peft.LoraConfig(r=2, lora_alpha=6, use_rslora=True, target_modules=["q_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(tiny_model("llama", 300, seed=3), config).eval()
    theirs.save_pretrained(tmp_path)
    lora = adapters.read_adapter(tmp_path)
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_rslora, lora.lora_dora) == (2, 6, True, False)
    own = split(tiny_model("llama", 300, seed=3)).eval()
    adapters.restrict(own, lora, freeze_head=False, seed=0)
    adapters.fill_adapter(own.model, tmp_path)
    assert torch.equal(logits(own.model), logits(theirs))


def _change(folder: Path, **entries) -> None:
    path = folder / adapters.ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"peft_type": "IA3"}, 'peft_type = "IA3"'),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": "four"}, "lora-rank 'four'"),
        ({"something_new": {"on": True}}, "something_new"),
    ],
)
def test_adapters_of_another_kind_are_refused_in_one_line(entries, message, tmp_path):
    student = adapted()
    adapters.write_adapter(student.model, student.lora, "base", tmp_path)
    _change(tmp_path, **entries)
    with pytest.raises(UsageError, match=message) as refused:
        adapters.read_adapter(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "table", [{}, {"lora_rank": "x"}, {"lora_rank": None}, {"lora_rank": 4, "lora_alpha": []}, {"lora_rank": -1}]
)
def test_a_description_that_is_none_is_refused_in_one_line(table):
    with pytest.raises(UsageError, match=r"^state\.json: ") as refused:
        adapters.lora_of(table, ["model.q_proj.lora_A.default.weight"], "state.json")
    assert "\n" not in str(refused.value)


def test_a_pattern_that_would_never_end_is_not_run(tmp_path):
    student = adapted()
    adapters.write_adapter(student.model, student.lora, "base", tmp_path)
    _change(tmp_path, target_modules="(a|a)*(a|a)*(a|a)*b" * 50)
    lora = adapters.read_adapter(tmp_path)
    assert {*lora.lora_names} == {*adapters.adapted(student.model)}


def test_many_tensors_are_refused_and_large_ones_of_another_shape_are_not_read(tmp_path, monkeypatch):
    student = adapted()
    names = (f"model.layers.{number}.q_proj.lora_A.weight" for number in range(10**9))
    with pytest.raises(UsageError, match="over 100,000 tensors"):
        adapters.lora_of({"lora_rank": 4}, names, "state.json")
    with pytest.raises(UsageError, match="no linear layer 'x"):  # a second, not minutes
        adapted(lora_targets=",".join(f"x{number}" for number in range(100_000)))
    adapters.write_adapter(student.model, student.lora, "base", tmp_path)
    tensors = load_file(tmp_path / adapters.WEIGHTS)
    save_file(tensors | {max(tensors): torch.zeros(4, 31)}, tmp_path / adapters.WEIGHTS)
    before = {name: each.clone() for name, each in student.state_dict().items()}
    with pytest.raises(UsageError, match=r"has shape \[4, 31\]"):
        adapters.fill_adapter(student.model, tmp_path, lambda whole, like: pytest.fail("a tensor was read"))
    assert all(torch.equal(each, before[name]) for name, each in student.state_dict().items())


def test_tensors_of_another_name_even_of_a_pattern_are_refused(tmp_path):
    student = adapted()
    adapters.write_adapter(student.model, student.lora, "base", tmp_path)
    tensors = load_file(tmp_path / adapters.WEIGHTS)
    for name, line in (("lm_head", "lm_head.weight of the adapter is"), ("(a|a)*b.lora_A", "of the adapter is")):
        save_file(tensors | {f"base_model.model.{name}.weight": torch.zeros(2)}, tmp_path / adapters.WEIGHTS)
        with pytest.raises(UsageError, match=f"{line} none of LoRA"):
            adapters.read_adapter(tmp_path)
    (tmp_path / adapters.WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="cannot be read"):
        adapters.read_adapter(tmp_path)


def test_a_model_without_its_adapters_is_its_base_and_they_still_learn():
    student = adapted()
    with adapters.adapters_off(student):
        assert torch.equal(logits(student.model), logits(tiny_model("llama", 300, seed=3).eval()))
        assert all(each.requires_grad for name, each in student.named_parameters() if ".lora_" in name)
    assert not torch.equal(logits(student.model), logits(tiny_model("llama", 300, seed=3).eval()))


def test_the_digest_of_the_frozen_weights_sees_them_and_not_the_adapters():
    one, other = adapted(), adapted(moved=False)
    assert adapters.frozen_digest(one, one.frozen) == adapters.frozen_digest(other, other.frozen)
    next(each for name, each in one.named_parameters() if name in one.frozen).data.flatten()[0] += 1e-6
    assert adapters.frozen_digest(one, one.frozen) != adapters.frozen_digest(other, other.frozen)


def test_a_frozen_head_freezes_the_embedding_that_is_tied_to_it():
    tied, own = split(tiny_model("llama", 300)), split(tiny_model("qwen3", 300))
    for student in (tied, own):
        adapters.restrict(student, None, freeze_head=True, seed=0)
    assert tied.frozen == {"model.lm_head.weight", "model.model.embed_tokens.weight"}
    assert own.frozen == {"model.lm_head.weight"}


def test_without_peft_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"LoRA needs the package peft; pip install 'kdtrain\[lora\]'"):
        adapters.inject(tiny_model("llama", 300), LoraConfig(lora_rank=4), seed=0)
