"""Students as GGUF files: read back by the package gguf, run by llama.cpp, refused where either would be wrong."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.plugins.gguf import check, write
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder
from tests.commands.conftest import TEXT, Workbench

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
RUNNERS = [each for each in check.LIBRARIES if check.importlib.util.find_spec(each)]
needs_llama_cpp = pytest.mark.skipif(RUNNERS[:1] != ["cyllama"], reason="cyllama is not installed")
TEACHER = Path(__file__).parents[3] / "teachers" / "stdlib-5m"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WIDE = {"hidden_size": 64, "intermediate_size": 88, "max_position_embeddings": 256, "head_dim": 32}
STUDENTS = {
    "llama": WIDE
    | {"attention_bias": True, "mlp_bias": True}
    | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}},
    "qwen2": {key: WIDE[key] for key in WIDE if key != "head_dim"} | {"tie_word_embeddings": False},
    "qwen3": WIDE | {"tie_word_embeddings": True},
}
"""Width 64 with heads of 32, rows of 88, which is no multiple of 32, and 16 rows beyond the tokenizer's 2,048."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Make a folder with a model of each student, random in weights, biases and norms, and one with adapters."""
    root = tmp_path_factory.mktemp("gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / name).write_bytes((TEACHER / name).read_bytes())
    (root / "tokenizer_config.json").write_text(
        json.dumps(json.loads((root / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages[0] }}"})
    )
    (root / "text.txt").write_text(TEXT)
    chance = torch.Generator().manual_seed(0)
    for shape, config in STUDENTS.items():
        model = tiny_model(shape, 2064, **config)
        for parameter in model.parameters():
            parameter.data += torch.randn(parameter.shape, generator=chance) * 0.2
        write_model_folder(root / shape, model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (root / shape / name).write_bytes((root / name).read_bytes())
    write_model_folder(root / "gpt2", tiny_model("gpt2", 300), tiny_tokenizer(300))
    write_model_folder(root / "odd", tiny_model("llama", 300), tiny_tokenizer(300))
    spelled = json.loads((root / "odd" / "tokenizer.json").read_text())
    spelled["pre_tokenizer"]["add_prefix_space"] = True
    (root / "odd" / "tokenizer.json").write_text(json.dumps(spelled))
    (root / "adapters.toml").write_text("source = 'qwen3'\n[lora]\nrank = 4\ntargets = ['q_proj', 'down_proj']\n")
    return root


@pytest.fixture
def bench(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    return Workbench(root, capsys)


@pytest.fixture
def run(bench):
    """Train a student once, and return the name of its run."""

    def make(name):
        student = f"{name}.toml" if name == "adapters" else name
        if not (bench.root / f"run-{name}").exists():
            argv = ("distill", "--data", "text.txt", "--student", student, "--out", f"run-{name}", "--steps", 1)
            sizes = ("--seq-len", 32, "--num-sequences", 8, "--num-workers", 0, "--validation-sequences", 8)
            bench.json(*argv, *sizes, *bench.plain, "--lr", 0.01)
        return f"run-{name}"

    return make


def logits_of_llama_cpp(file, rows):
    request = {"file": str(file), "texts": [], "rows": rows, "threads": 1}
    with tempfile.TemporaryFile() as answers:
        check._run("cyllama", request, answers)
        assert str(np.load(answers)) == "[]"
        yield from (np.load(answers) for _ in rows)


@needs_llama_cpp
@pytest.mark.parametrize("name", [*STUDENTS, "adapters"])
def test_llama_cpp_computes_from_the_file_what_transformers_computes_from_the_folder(bench, run, name):
    found = bench.json("export", run(name), "--format", "gguf", "--out", f"{name}-gguf")
    bench.json("export", run(name), "--out", f"{name}-folder")
    assert "cyllama" in found["checked"] and found["next"] == f"llama-cli -m {name}-gguf/{name}-gguf.gguf"
    model = AutoModelForCausalLM.from_pretrained(f"{name}-folder")
    rows = [[(7 * place * place + 3) % 2048 for place in range(length)] for length in (100, 1)]
    for row, theirs in zip(rows, logits_of_llama_cpp(f"{name}-gguf/{name}-gguf.gguf", rows), strict=True):
        ours = model(torch.tensor([row])).logits[0].detach().numpy()
        assert np.abs(ours).max() > 5 and np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("options", [("fp32",), ("fp16",), ("bf16",), ("fp16", "--quantize", "q8_0")], ids="-".join)
@pytest.mark.parametrize("name", STUDENTS)
def test_the_package_gguf_reads_the_tensors_and_the_tokenizer_back(bench, run, monkeypatch, name, options):
    monkeypatch.setattr(check, "LIBRARIES", ())
    out = f"{name}-{'-'.join(options)}"
    argv = ("export", run(name), "--format", "gguf", "--out", out, "--license", "mit", "--dtype", *options)
    code, _, err = bench.call(*argv)
    assert code == 0, err
    odd = options[-1] == "q8_0"
    assert ("tensors stay in F16, as blk.0.ffn_down.weight: their rows are not multiples of 32" in err) == odd
    reader = gguf.GGUFReader(f"{out}/{out}.gguf")
    entries = {key: field.contents() for key, field in reader.fields.items()}
    size = STUDENTS[name].get("head_dim", 16)
    assert {entries[f"{name}.attention.{part}_length"] for part in ("key", "value")} == {size}
    assert entries[f"{name}.rope.dimension_count"] == size and entries["general.license"] == "mit"
    pre = "qwen2" if name == "qwen2" else "gpt-2"  # transformers splits as Qwen2 beside a configuration of it
    assert (entries["tokenizer.ggml.pre"], entries["tokenizer.ggml.add_bos_token"]) == (pre, False)
    assert (entries["tokenizer.ggml.eos_token_id"], entries["tokenizer.chat_template"]) == (0, "{{ messages[0] }}")
    tokens, types = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
    assert tokens[2048:] == [f"[PAD{number}]" for number in range(2048, 2064)]
    assert (types[0], set(types[1:2048]), set(types[2048:])) == (3, {1}, {5})
    assert {"Ġ Ġ"} <= {*entries["tokenizer.ggml.merges"]}

    tensors = {each.name: each for each in reader.tensors}
    assert ("output.weight" in tensors) == (name == "qwen2")
    assert ("rope_freqs.weight" in tensors) == ("blk.1.attn_q.bias" in tensors and name != "qwen2")
    weights = AutoModelForCausalLM.from_pretrained(f"run-{name}/student").state_dict()
    kinds = {"fp32": ("F32", 1e-7), "fp16": ("F16", 1e-3), "bf16": ("BF16", 5e-3), "q8_0": ("Q8_0", 2e-2)}
    kind, error = kinds[options[-1]]
    for theirs, ours in {"blk.1.ffn_up": "model.layers.1.mlp.up_proj", "token_embd": "model.embed_tokens"}.items():
        each = tensors[f"{theirs}.weight"]
        assert each.tensor_type.name == kind
        values = gguf.dequantize(each.data, each.tensor_type)
        assert np.abs(values - weights[f"{ours}.weight"].numpy()).max() <= error * np.abs(values).max()
    assert {each.tensor_type.name for each in reader.tensors if "norm" in each.name or "bias" in each.name} == {"F32"}
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == ("F16" if odd else kind)
    card = Path(out, "README.md").read_text()
    assert "not checked in llama.cpp" in card and f"llama-cli -m path/to/{out}/{out}.gguf" in card
    assert card.startswith(f"# {out}\n") and f"| weights | {kind} |" in card


def test_named_chat_templates_are_written_and_read_beside_the_default(bench, run, monkeypatch):
    monkeypatch.setattr(check, "LIBRARIES", ())
    shutil.copytree("qwen3", "named")
    named = {"default": "{{ messages[0] }}", "tool_use": "{{ tools }}"}
    config = json.loads(Path("named/tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    Path("named/tokenizer_config.json").write_text(json.dumps(config))
    bench.json("export", run("named"), "--format", "gguf", "--out", "templates")
    fields = gguf.GGUFReader("templates/templates.gguf").fields
    written = {key: fields[key].contents() for key in fields if key.startswith("tokenizer.chat")}
    names = {"tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.chat_templates": ["tool_use"]}
    assert written == {"tokenizer.chat_template": "{{ messages[0] }}", **names}
    assert load_tokenizer("templates/templates.gguf").chat_template == named


@pytest.mark.parametrize("library", RUNNERS)
@pytest.mark.parametrize("kind", [("--dtype", "bf16"), ("--quantize", "q8_0")], ids=" ".join)
def test_the_card_has_the_figures_of_the_check(bench, run, monkeypatch, library, kind):
    monkeypatch.setattr(check, "LIBRARIES", (library,))
    bench.json("export", run("llama"), "--format", "gguf", "--out", f"by-{library}", "--overwrite", *kind)
    card = Path(f"by-{library}/README.md").read_text()
    assert f"llama.cpp ({library} " in card and "the same ids of 200 texts; in F32 log p at " in card
    assert f"; in {kind[1].upper()} log p at " in card and "median KL " in card


@pytest.mark.parametrize(
    "library, size, rows",
    [("xllamacpp", 49_152, 200), ("xllamacpp", 151_936, 66), ("cyllama", 49_152, 42), ("cyllama", 151_936, 13)],
)
def test_xllamacpp_answers_200_texts_at_the_vocabulary_of_smollm2_and_fewer_at_larger_ones(library, size, rows):
    config = SimpleNamespace(vocab_size=size, max_position_embeddings=2048)
    model = SimpleNamespace(config=config, num_parameters=lambda: 0.1e9)
    assert len(check.probe_rows(library, [[0] * 24] * check.TEXTS, model)) == rows


def fails(bench, run, name="llama"):
    before = sorted(bench.root.iterdir())
    code, out, err = bench.call("export", run(name), "--format", "gguf", "--out", "wrong", "--dtype", "bf16")
    assert (code, out) == (1, "") and sorted(bench.root.iterdir()) == before
    (line,) = err.strip().splitlines()[-1:]
    return line


@pytest.mark.parametrize("library", RUNNERS)
@pytest.mark.parametrize("wrong", ["rows of Q and K", "rope_freqs", "pre"])
def test_a_wrong_rule_is_found_in_llama_cpp_and_leaves_nothing(bench, run, monkeypatch, library, wrong):
    run("llama")
    monkeypatch.setattr(check, "LIBRARIES", (library,))
    if wrong == "rows of Q and K":
        monkeypatch.setattr(write, "rearrange", lambda tensor, *_, **__: tensor)
    if wrong == "rope_freqs":
        whole = write._tensors
        monkeypatch.setattr(write, "_tensors", lambda *of: [each for each in whole(*of) if "rope" not in each[0]])
    if wrong == "pre":
        monkeypatch.setattr(write, "PRE_TOKENIZERS", {"smollm": write.PRE_TOKENIZERS["gpt-2"]})
    line = fails(bench, run)
    found = "splits '" if wrong == "pre" else "positions with a largest difference of "
    assert "wrong.gguf is not published: llama.cpp (" in line and found in line


@pytest.mark.skipif(not RUNNERS, reason="llama.cpp is not installed")
def test_a_crash_of_llama_cpp_is_one_line(bench, run, monkeypatch, tmp_path):
    run("llama")
    (tmp_path / "crash.py").write_text("import os, sys\nprint('bad file', file=sys.stderr, flush=True)\nos.abort()\n")
    monkeypatch.setattr(check.runner, "__file__", str(tmp_path / "crash.py"))
    assert "ended with code -6: bad file" in fails(bench, run)


@pytest.mark.parametrize(
    "student, more, message",
    [
        ("llama", ("--format", "gguf", "--adapter"), "--format gguf does not take --adapter"),
        ("llama", ("--format", "gguf", "--shard-size", 1), "--format gguf does not take --shard-size"),
        ("llama", ("--format", "gguf", "--quantize", "int8"), "--format gguf does not take --quantize int8"),
        ("llama", ("--quantize", "q8_0"), "--format safetensors does not take --quantize q8_0"),
        ("llama", ("--format", "ggml"), "--format ggml is unknown; known are safetensors, gguf"),
        ("llama", ("--format", "gguf", "--out", "x.gguf"), "name it without .gguf"),
        ("llama", ("--format", "gguf", "--out", "there"), "add --overwrite"),
        ("gpt2", ("--format", "gguf"), "--format gguf writes llama, qwen2, qwen3, and this student is gpt2"),
        ("odd", ("--format", "gguf"), "splits texts as gpt-2, smollm, "),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_is_no_gguf_is_refused_in_one_line(bench, run, student, more, message):
    run(student)
    if "there" in more and not (bench.root / "there").exists():
        bench.json("export", f"run-{student}", "--out", "there")
    more = more if "--out" in more else (*more, "--out", "new")
    code, _, err = bench.call("export", f"run-{student}", *more)
    assert code == 2 and message in err.splitlines()[-1] and not (bench.root / "new").exists()


def test_an_export_without_a_format_loads_nothing_of_this_plugin(bench, run):
    code = (
        "import sys; from kdtrain import cli\ntry: cli.main(sys.argv[1:])\nexcept SystemExit as it: assert not it.code"
    )
    code += "\nassert not [each for each in sys.modules if each.startswith(('kdtrain.plugins.gguf', 'gguf'))]"
    words = [sys.executable, "-c", code, "export", run("llama"), "--out", "plain"]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
