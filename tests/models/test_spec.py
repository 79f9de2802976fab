"""Specs: the names of models, their paths, and the line of each refusal."""

from dataclasses import replace
from pathlib import Path

import pytest

from kdtrain.config.sections import LoraConfig
from kdtrain.errors import UsageError
from kdtrain.models.spec import ModelSpec
from kdtrain.testing import tiny_model, write_model_folder

CONFIG = "[config]\nmodel_type = 'llama'\n"


def write(tmp_path, text):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return str(path)


def test_a_toml_gives_its_values_and_defaults_for_the_rest(tmp_path):
    spec = ModelSpec.read(write(tmp_path, "dtype = 'bfloat16'\nsource = 'org/name'\nrevision = 'v1'\n"))
    assert spec == ModelSpec(name="spec", source="org/name", dtype="bfloat16", revision="v1")
    assert (spec.attention, spec.init, spec.trust_remote_code) == ("auto", "pretrained", False)


def test_paths_in_a_toml_are_relative_to_the_toml(tmp_path, monkeypatch):
    (tmp_path / "specs").mkdir()
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "specs" / "a.toml").write_text("source = '../models/m'\ntokenizer = '../models/m'\n")
    monkeypatch.chdir(tmp_path)
    spec = ModelSpec.read("specs/a.toml")
    assert (spec.source, spec.tokenizer) == ("models/m", "models/m")
    layers = "init = 'teacher-layers'\nlayers = [1, 0]\nteacher = 'a.toml'\n"
    (tmp_path / "specs" / "b.toml").write_text(layers)
    assert (ModelSpec.read("specs/b.toml").teacher, ModelSpec.read("specs/b.toml").layers) == ("specs/a.toml", (1, 0))


def test_a_teacher_of_another_kind_needs_a_tokenizer_alone_and_has_options_of_its_own(tmp_path):
    spec = ModelSpec.read(write(tmp_path, "kind = 'table'\ntokenizer = 'org/name'\n[options]\nseed = 3\n"))
    assert (spec.kind, spec.source, spec.options) == ("table", None, {"seed": 3})
    assert ModelSpec.read("org/name").kind == "local"


def test_a_table_of_adapters_has_the_names_of_the_options_without_their_beginning(tmp_path):
    text = "source = 'org/name'\n[lora]\nrank = 8\nalpha = 16\ntargets = ['q_proj', 'v_proj']\nlayers = 2\n"
    lora = ModelSpec.read(write(tmp_path, text)).lora
    assert lora == LoraConfig(lora_rank=8, lora_alpha=16, lora_targets="q_proj,v_proj", lora_layers=2)
    whole = LoraConfig(lora_rank=8, lora_alpha=16, lora_dropout=0.0, lora_targets="q_proj,v_proj", lora_layers=2)
    assert LoraConfig().over(lora) == whole
    assert LoraConfig(lora_rank=4, lora_alpha=32).over(lora) == replace(whole, lora_rank=4, lora_alpha=32)
    assert LoraConfig().over(None) is None


@pytest.mark.parametrize(
    "table, message",
    [
        ("lora = 8", "lora is a table with a rank"),
        ("[lora]\nalpha = 8", "lora is a table with a rank"),
        ("[lora]\nrank = 8\nrnk = 4", "unknown key 'rnk' in [lora]; perhaps you meant 'rank'"),
        ("[lora]\nrank = 0", "[lora]: rank 0 must be at least 1"),
        ("[lora]\nrank = 8\ndropout = 'much'", "[lora]: dropout 'much': a number is wanted"),
    ],
)
def test_a_table_of_adapters_that_is_none_is_refused(tmp_path, table, message):
    with pytest.raises(UsageError) as refused:
        ModelSpec.read(write(tmp_path, f"source = 'org/name'\n{table}\n"))
    assert message in refused.value.args[0]


def test_a_configuration_without_init_starts_from_scratch(tmp_path):
    assert ModelSpec.read(write(tmp_path, CONFIG)).init == "scratch"


def test_a_model_folder_and_a_run_with_an_exported_student_are_specs(tmp_path):
    write_model_folder(tmp_path / "run" / "student", tiny_model())
    assert ModelSpec.read(str(tmp_path / "run" / "student")).source == str(tmp_path / "run" / "student")
    run = ModelSpec.read(str(tmp_path / "run"))
    assert (run.name, run.source) == ("run", str(tmp_path / "run" / "student"))


def test_a_shipped_name_wins_over_a_folder_of_that_name_which_is_found_by_its_path(tmp_path, monkeypatch):
    write_model_folder(tmp_path / "stdlib-1m" / "student", tiny_model())
    write_model_folder(tmp_path / "stdlib-5m", tiny_model())
    monkeypatch.chdir(tmp_path)
    assert ModelSpec.read("stdlib-1m").config and ModelSpec.read("./stdlib-1m").source == "stdlib-1m/student"
    assert "stdlib-1m" not in ModelSpec.paths_of("stdlib-1m", "").values(), "a run may be written there"
    layers = "init = 'teacher-layers'\nlayers = [1, 0]\nteacher = "
    sources = []
    for name in ("stdlib-5m", "./stdlib-5m"):
        (tmp_path / "spec.toml").write_text(f"{layers}'{name}'\n")
        sources.append(ModelSpec.read(ModelSpec.read("spec.toml").teacher, "teachers").source)
    assert sources == [ModelSpec.read("stdlib-5m", "teachers").source, "stdlib-5m"]


def test_a_toml_names_what_ships_where_nothing_of_that_name_lies_beside_it(tmp_path):
    ships = ModelSpec.read("stdlib-5m", "teachers").source
    named = ModelSpec.read(str(write(tmp_path, "tokenizer = 'stdlib-5m'\nsource = 'stdlib-5m'")))
    assert (named.tokenizer, named.source) == (ships, ships) and Path(ships, "tokenizer.json").is_file()
    (tmp_path / "stdlib-5m").mkdir()
    beside = ModelSpec.read(str(write(tmp_path, "source = 'stdlib-5m'")))
    assert Path(beside.source) == tmp_path / "stdlib-5m"


def test_a_hub_id_is_a_spec_and_is_not_looked_up():
    assert ModelSpec.read("no-such-org/no-such-model").source == "no-such-org/no-such-model"


@pytest.mark.parametrize(
    "spec, line",
    [
        ("nowhere", "no such file or folder, and a hub id is of the form org/name"),
        ("a/b/c", "no such file or folder"),
        ("specs/missing.toml", "specs/missing.toml: there is no such file"),
        ("specs/missing", "no such file or folder"),
        ("specs/notes.txt", "this is another file"),
        ("specs", "no config.json in this folder"),
        ("adapter", "adapter holds an adapter; merge it into its base, or name that and add --load"),
        ("unexported", "no exported student; write one with 'kdtrain export unexported'"),
    ],
)
def test_a_spec_that_is_not_a_file_a_folder_or_a_hub_id_is_refused_in_one_line(tmp_path, monkeypatch, spec, line):
    for folder in ("specs", "unexported", "adapter"):
        (tmp_path / folder).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "specs" / "notes.txt").write_text("")
    (tmp_path / "unexported" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        ModelSpec.read(spec)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("beside", ["config.json", "checkpoints/step-00000001/state.json", "adapter_config.json"])
def test_a_pattern_that_may_have_been_downloaded_is_refused_and_names_are_not(tmp_path, beside):
    spec = write(tmp_path, "source = 'org/name'\n[lora]\nrank = 8\ntargets = '(a|a)*b'\n")
    assert ModelSpec.read(spec).lora.lora_pattern == "(a|a)*b"
    (tmp_path / beside).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / beside).write_text("{}")
    with pytest.raises(UsageError, match=r"a regular expression as targets in \[lora\] must be in a spec of your own"):
        ModelSpec.read(spec)
    names = write(tmp_path, "source = 'org/name'\n[lora]\nrank = 8\ntargets = 'q_proj,v_proj'\n")
    assert ModelSpec.read(names).lora.lora_names == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "text, line",
    [
        ("sauce = 'org/name'", "unknown key 'sauce'; did you mean source?"),
        ("zzz = 1", "unknown key 'zzz'; did you mean name, source"),
        ("name = ", "not valid TOML"),
        ("dtype = 'float64'", "dtype = 'float64' is unknown; use float32, bfloat16, float16"),
        ("attention = 'flash'", "use auto, sdpa, eager, flash_attention_2"),
        ("init = 'random'", "use pretrained, scratch, teacher-layers"),
        ("name = 'x'", "neither source nor [config]; give one of them"),
        ("source = 'org/name'\n" + CONFIG, "both source and [config]; give one of them"),
        ("source = 'missing'", "no such path beside this file"),
        ("source = 7", "source = 7: write a string"),
        ("name = ''\nsource = 'a/b'", "name = '': write a string that is not empty"),
        ("config = 'llama'", "write [config] and its entries below it"),
        ("[config]\nhidden_size = 8", "[config] has no model_type"),
        ("init = 'pretrained'\n" + CONFIG, "[config] has no weights"),
        ("layers = [0]\nsource = 'a/b'", "teacher and layers need init = 'teacher-layers'"),
        ("init = 'teacher-layers'\nteacher = 'a/b'", "needs teacher (a spec) and layers"),
        ("init = 'teacher-layers'\nteacher = 'a/b'\nlayers = [-1]", "counted from 0"),
        ("init = 'teacher-layers'\nteacher = 'a/b'\nlayers = ['0']", "layers is a list of numbers"),
        ("init = 'teacher-layers'\nteacher = 'a/b'\nlayers = [0]\nsource = 'c/d'", "take source out"),
        ("source = 'a/b'\ntrust_remote_code = 'yes'", "trust_remote_code is true or false"),
        ("kind = 'table'\n[options]\nseed = 3", "kind = 'table' needs tokenizer"),
        ("source = 'a/b'\n[options]\nseed = 3", "[options] are for a kind other than local"),
        ("kind = 'table'\ntokenizer = 'a/b'\n[options]\nday = 2026-01-01", "[options] hold text, finite numbers"),
        ("kind = 'table'\ntokenizer = 'a/b'\n[options]\nT = nan", "[options] hold text, finite numbers"),
        ("kind = 7\nsource = 'a/b'", "kind = 7: write a string"),
        ("options = 3\nkind = 'table'\ntokenizer = 'a/b'", "write [options] and its entries below it"),
        ("x = " + "[" * 20_000 + "]" * 20_000, "nested too deep"),
        ("source = '~no-such-user/m'", "source = '~no-such-user/m': there is no user of that name"),
        ("source = 'a\\u0000b'".replace("'", '"'), "holds a NUL; take it out"),
        ("tokenizer = '" + "n" * 5000 + "'\nsource = 'a/b'", "is longer than a path can be"),
        ("source = '" + "n/" * 2500 + "'", "is longer than a path can be: 255 bytes a name, 4,095 in all"),
        ("source = 'spec.toml'", "is a file; name a folder or a hub id"),
        ("init = 'teacher-layers'\nlayers = [0]\nteacher = 'spec.toml'", "has a teacher, and so on, without end"),
    ],
)
def test_a_wrong_toml_is_refused_in_one_line_that_names_file_and_key(tmp_path, text, line):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        ModelSpec.read(path)
    assert str(caught.value).startswith(path) and line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_specs_that_name_each_other_as_teacher_are_refused(tmp_path):
    for own, other in (("a", "b"), ("b", "a")):
        text = f"init = 'teacher-layers'\nlayers = [0]\nteacher = '{other}.toml'\n"
        (tmp_path / f"{own}.toml").write_text(text)
    with pytest.raises(UsageError, match=r"without end: .*a\.toml -> .*b\.toml -> .*a\.toml -> .*b\.toml \.\.\."):
        ModelSpec.read(str(tmp_path / "a.toml"))
