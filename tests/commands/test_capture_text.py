"""What a capture says of its text: which files it read, that they changed since, and that they are too short."""

import json
import logging
import re
import shutil
import tomllib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kdtrain as kd
from kdtrain.cache.format.manifest import Manifest
from kdtrain.cli.parsing import parse
from kdtrain.commands.evaluate import evaluate
from kdtrain.config.commands import EvaluateConfig
from kdtrain.config.sections import CodecConfig, DataConfig, MonitorConfig, PrecisionConfig, TextConfig
from kdtrain.data import corpus
from kdtrain.data.order import permutation
from kdtrain.errors import UsageError
from kdtrain.files import file_digest, publish_json, read_sealed
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.plugins.served.live_capture import Capture, LiveCache
from kdtrain.run import build_cache
from kdtrain.run import capture as run_capture
from kdtrain.run.folder import changes
from kdtrain.run.paths import problem
from kdtrain.teaching.local import LocalTeacher
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

DATED = (
    "[{{ strftime_now('%Y %H %M') }}]{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
PLAIN: dict[str, Any] = {
    "precision": PrecisionConfig(precision="fp32", compile=False),
    "monitor": MonitorConfig(log_to="none"),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = DATED
    write_model_folder(folder, tiny_model("llama", 300, seed=1), tokenizer)
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the lines that are logged."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(logging.getLogger("kdtrain"), level, lambda text, *words: lines.append(text % words))
    return lines


def configuration(teacher: Path, data: str, seq_len: int = 8, **options: object) -> kd.CacheTeacherConfig:
    given = DataConfig(data=data, seq_len=seq_len, num_sequences=12, validation_sequences=2, num_workers=0)
    words: dict[str, object] = {
        "data": replace(given, document_mask=options.pop("document_mask", "auto")),
        "codec": CodecConfig(top_k=2),
        "sequences_per_shard": 4,
        "precision": "fp32",
        "compile": False,
        "out": Path("c"),
    }
    return kd.CacheTeacherConfig(teacher=str(teacher), **words | options)  # type: ignore[arg-type]


def capture(teacher: Path, data: str, seq_len: int = 8, **options: object) -> kd.Cache:
    return kd.cache_teacher(configuration(teacher, data, seq_len, **options))


def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack conversations as releases did that neither kept them whole nor apart."""
    monkeypatch.setattr(build_cache, "pin_text", lambda *_: {})
    monkeypatch.setattr(run_capture, "pin_text", lambda *_: {})
    monkeypatch.setattr(build_cache, "has_prompts", lambda _: False)


def write_rows(path: Path, word: str = "why", rows: int = 30) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{word} is row {n} what it is?"}) + "\n" for n in range(rows)))


def write_chats(path: Path) -> None:
    turns = [[{"role": "user", "content": f"why {n}?"}, {"role": "assistant", "content": "so."}] for n in range(40)]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))


def refuse_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(LocalTeacher, "load", load)


def without_text(cache: Path) -> None:
    """Make the manifest one of before the text was stated."""
    record = read_sealed(cache / "manifest.json")
    publish_json(cache / "manifest.json", {key: record[key] for key in record if key != "text"}, "test")


def test_a_finished_cache_whose_text_changed_is_refused_before_the_model_is_loaded(
    teacher: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
):
    for name in ("a", "b"):
        write_rows(Path(f"rows/{name}.jsonl"), name)
    files = [Path(f"rows/{name}.jsonl") for name in ("a", "b")]
    assert capture(teacher, "rows").manifest.text == {
        "files": {each.name: {"bytes": each.stat().st_size, "sha256": file_digest(each)} for each in files}
    }
    capture(teacher, "rows")
    assert "c was finished before, of the same text" in said

    refuse_loading(monkeypatch)
    write_rows(Path("rows/b.jsonl"), "c")
    with pytest.raises(
        UsageError, match=r"c holds a finished cache, and rows changed since \(files\.b\.jsonl\.sha256: "
    ):
        capture(teacher, "rows")
    Path("rows/b.jsonl").unlink()
    with pytest.raises(
        UsageError, match=r"rows changed since \(files\.b\.jsonl: .* there, None here\); choose another"
    ):
        capture(teacher, "rows")


def test_ranks_that_do_not_see_each_others_manifest_make_the_same_calls_of_all_ranks(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []

    def counted(module: ModuleType) -> None:
        on_main = module.on_main
        monkeypatch.setattr(module, "on_main", lambda action: (calls.append(module.__name__), on_main(action))[1])

    write_rows(Path("a.jsonl"))
    counted(run_capture)
    counted(build_cache)
    capture(teacher, "a.jsonl")
    fresh = list(calls)
    calls.clear()
    capture(teacher, "a.jsonl")
    assert calls == fresh


def test_an_older_cache_says_that_nobody_can_tell_whether_its_text_changed(teacher: Path, said: list[str]):
    write_rows(Path("a.jsonl"))
    capture(teacher, "a.jsonl")
    without_text(Path("c"))
    write_rows(Path("a.jsonl"), "another")
    assert capture(teacher, "a.jsonl").manifest.text is None
    assert "c was finished before, and its manifest does not tell whether a.jsonl changed since" in said


def test_a_data_set_of_the_hub_is_known_by_its_revision_and_many_files_by_one_digest(monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, subset: SimpleNamespace(hash=f"{name} {subset}"))
    assert corpus.stated_text(DataConfig(data="hf:org/name:part")) == {"revision": "org/name part"}
    stated = corpus.stated_text(DataConfig(data="stdlib"))
    assert stated is not None and stated.keys() == {"files", "sha256"} and stated["files"] > 300


def test_a_finished_cache_of_the_hub_stays_when_its_data_set_has_another_revision(
    teacher: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
):
    write_rows(Path("a.jsonl"))
    for revision in ("one", "two"):
        monkeypatch.setattr(build_cache, "stated_text", lambda data, found=revision: {"revision": found})
        assert capture(teacher, "a.jsonl").manifest.text == {"revision": "one"}
    assert "c was finished before and is used as it is: a.jsonl changed since (revision: one there, two here)" in said


def test_a_run_that_reads_what_it_packed_names_what_changed_since(said: list[str]):
    write_rows(Path("a.jsonl"))
    data = DataConfig(data="a.jsonl", seq_len=8, num_sequences=12, validation_sequences=2, num_workers=0)

    def build() -> Manifest:
        return build_cache.build_tokens(Path("data"), data, tiny_tokenizer(300), 300)

    first = build()
    assert first == build() and not any("finished before" in each for each in said)
    write_rows(Path("a.jsonl"), "another")
    assert first == build()
    [line] = [each for each in said if "finished before" in each]
    assert "data was finished before and is used as it is: a.jsonl changed since (files.a.jsonl.bytes: " in line


def test_a_resume_renders_the_date_of_the_first_command_and_keeps_its_shards(
    teacher: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
):
    def at(moment: str) -> None:
        now = datetime.fromisoformat(moment)
        clock = SimpleNamespace(now=lambda: now, fromisoformat=datetime.fromisoformat)
        monkeypatch.setattr(build_cache, "datetime", clock)

    write_chats(Path("chats.jsonl"))
    at("2031-01-02T03:04:05")
    whole = capture(teacher, "chats.jsonl", seq_len=32).manifest
    assert whole.settings.data["date"] == "2031-01-02T03:04:05"
    shown = tiny_tokenizer(300).decode([each for row in (0, 1) for each in kd.Cache("c")["train"][row]["tokens"][:-1]])
    assert "[2031 03 04]" in shown

    for name in ("manifest.json", "shards/train-00002.h5", "shards/train-00002.json"):
        Path("c", name).unlink()
    kept = Path("c/shards/train-00000.h5").stat().st_ino
    at("2032-05-06T07:08:09")
    assert capture(teacher, "chats.jsonl", seq_len=32).manifest.digest == whole.digest
    assert Path("c/shards/train-00000.h5").stat().st_ino == kept and not any("made again" in each for each in said)
    shutil.rmtree("c")
    assert capture(teacher, "chats.jsonl", seq_len=32).manifest.settings.data["date"] == "2032-05-06T07:08:09"


@pytest.mark.parametrize(
    ("template", "date"),
    [
        ("{% if strftime_now is defined %}{{ strftime_now('%-d %b %Y, %%H') }}{% endif %}", "2031-01-02T00:00:00"),
        ('{{ strftime_now( "%Y-%m-%d" ) }}{{ strftime_now("%F") }}', "2031-01-02T00:00:00"),
        ("{{ strftime_now('%F') }}{{ strftime_now('%T') }}", "2031-01-02T03:04:05"),
        ("{{ strftime_now('%%%H') }}", "2031-01-02T03:04:05"),
        ("{{ strftime_now('%d %OM') }}", "2031-01-02T03:04:05"),
        ("{% set shown = '%H' %}{{ strftime_now('%d' ~ shown) }}", "2031-01-02T03:04:05"),
        ("{% set clock = strftime_now %}{{ clock('%H') }}{{ strftime_now('%F') }}", "2031-01-02T03:04:05"),
        ({"default": "{{ strftime_now('%F') }}", "rag": "{{ strftime_now('%c') }}"}, "2031-01-02T03:04:05"),
        ("no date", None),
    ],
)
def test_a_template_that_shows_the_day_alone_is_of_the_day_and_any_other_of_the_moment(
    template: str | dict[str, str], date: str | None, monkeypatch: pytest.MonkeyPatch
):
    write_chats(Path("chats.jsonl"))
    clock = SimpleNamespace(now=lambda: datetime(2031, 1, 2, 3, 4, 5, 678), fromisoformat=datetime.fromisoformat)
    monkeypatch.setattr(build_cache, "datetime", clock)
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = template
    assert build_cache.pin_text(Path("c"), DataConfig(data="chats.jsonl"), tokenizer).get("date") == date


def test_eight_conversations_are_cached_and_a_cache_that_was_begun_before_keeps_its_rows(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
):
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    talks = [{"messages": [*turns, {"role": "user", "content": f"{n}"}, turns[1]]} for n in range(8)]
    Path("chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    found = capture(teacher, "chats.jsonl", seq_len=128)
    assert found.manifest.settings.data["packing"] == "whole" and found.manifest.splits["validation"]["sequences"] == 1
    counted = found["validation"][0]["loss_mask"]
    assert 0 < counted.sum() < 64 and not counted[-8:].any()  # what fills the row is not learned
    config = kd.DistillConfig(student=str(teacher), cache="c", out=Path("r"), steps=1, batch_size=2, **PLAIN)
    assert kd.distill(config)["steps"] == 1
    assert evaluate(EvaluateConfig(student="r", cache="c"), "r")["tokens"] == counted.sum()
    with monkeypatch.context() as patched:
        as_before(patched)
        joined = capture(teacher, "chats.jsonl", seq_len=16, out=Path("old")).manifest
    assert "packing" not in joined.settings.data and not joined.settings.document_mask
    assert capture(teacher, "chats.jsonl", seq_len=16, out=Path("old")).manifest.digest == joined.digest
    assert capture(teacher, "chats.jsonl", seq_len=16, out=Path("new")).manifest.digest != joined.digest


def test_a_cache_keeps_conversations_apart_where_the_teacher_can_and_no_other_text(teacher: Path, said: list[str]):
    bloom = write_model_folder(Path("bloom"), tiny_model("bloom", 300), load_tokenizer(teacher))
    write_chats(Path("chats.jsonl"))
    write_rows(Path("a.jsonl"))
    written: dict[str, object] = {"text": TextConfig(generate=True, max_new_tokens=2), "batch_size": 4}

    def apart(by: Path, data: str, **options: object) -> bool:
        shutil.rmtree("c", ignore_errors=True)
        return capture(by, data, seq_len=32, **options).manifest.settings.document_mask

    assert apart(teacher, "chats.jsonl") and not apart(teacher, "a.jsonl")
    assert not apart(teacher, "chats.jsonl", **written) and not apart(bloom, "chats.jsonl")
    assert apart(teacher, "a.jsonl", document_mask=True) and not apart(teacher, "chats.jsonl", document_mask=False)
    assert [each for each in said if "auto is off" in each] == [
        "--document-mask auto is off: bloom cannot keep packed documents apart; use --no-document-mask"
    ]


@pytest.mark.parametrize("taught", [True, False])
def test_a_run_keeps_conversations_apart_where_both_models_can_and_one_of_before_goes_on_without(
    teacher: Path, taught: bool, monkeypatch: pytest.MonkeyPatch
):
    bloom = write_model_folder(Path("bloom"), tiny_model("bloom", 300), load_tokenizer(teacher))
    write_chats(Path("chats.jsonl"))

    def train(student: Path, out: str, steps: int, by: Path = teacher) -> tuple[object, bool]:
        given = configuration(teacher, "chats.jsonl", seq_len=32).data
        kd.distill(
            kd.DistillConfig(
                student=str(student),
                teacher=str(by) if taught else None,
                data=given,
                out=Path(out),
                steps=steps,
                batch_size=2,
                **PLAIN,
            )
        )
        held = tomllib.loads(Path(out, "config.toml").read_text())["data"]["document_mask"]
        return held, kd.Cache(Path(out, "data")).manifest.settings.document_mask

    assert train(teacher, "apart", 1) == train(teacher, "apart", 2) == (True, True)
    assert train(bloom, "together", 1) == (False, False)
    if taught:
        assert train(teacher, "beside", 1, by=bloom) == (False, False)
    with monkeypatch.context() as patched:
        as_before(patched)
        assert train(teacher, "old", 1) == (False, False)
    assert train(teacher, "old", 2) == (False, False)


def test_a_document_mask_is_a_switch_that_also_takes_auto():
    for words, mask in (
        ([], "auto"),
        (["--document-mask"], True),
        (["--no-document-mask"], False),
        (["--document-mask", "auto"], "auto"),
        (["--document-mask=auto"], "auto"),
    ):
        given = ["--teacher", "stdlib-5m", "--data", "stdlib", "--out", "c", *words]
        assert parse("kdtrain cache-teacher", kd.CacheTeacherConfig, given, {}).data.document_mask == mask
    config = kd.DistillConfig(student="a", cache="c", out=Path("r"))
    assert not changes({"data": {"document_mask": False}}, config, only="data")


def test_a_cache_that_a_run_captures_states_the_text_and_the_date_of_what_the_run_packed(teacher: Path):
    write_chats(Path("chats.jsonl"))
    config = configuration(teacher, "chats.jsonl", seq_len=16, out=Path("run/served"))
    how = Capture(
        seed=0,
        order=lambda sequences: permutation(0, 0, sequences),
        planned=lambda sequences: sequences,
        build=lambda ordered: run_capture.capture(config, torch.device("cpu"), ordered),
        whole=True,
    )
    live = LiveCache(config.out, how)
    live.open()
    live.finish()
    packed, captured = (kd.Cache(f"run/{name}").manifest for name in ("data", "served"))
    assert captured.text == packed.text and "chats.jsonl" in (captured.text or {})["files"]
    assert captured.settings.data["date"] == packed.settings.data["date"] and "order" in captured.settings.data


def test_shards_of_another_text_are_named_when_a_resume_makes_them_again(teacher: Path, said: list[str]):
    write_rows(Path("a.jsonl"))
    capture(teacher, "a.jsonl")
    Path("c/manifest.json").unlink()
    write_rows(Path("a.jsonl"), "other")
    capture(teacher, "a.jsonl")
    for name in ("train-00000", "train-00002", "validation-00000"):
        assert f"c: the shard {name} is of other text than the data give now, and is made again" in said


def test_the_text_that_a_run_packs_is_stated_too():
    write_rows(Path("a.jsonl"))
    data = DataConfig(data="a.jsonl", seq_len=8, num_sequences=12, validation_sequences=2, num_workers=0)
    first = build_cache.build_tokens(Path("data"), data, tiny_tokenizer(300), 300)
    assert first.text == {
        "files": {"a.jsonl": {"bytes": Path("a.jsonl").stat().st_size, "sha256": file_digest(Path("a.jsonl"))}}
    }


def test_a_split_without_a_whole_sequence_is_refused_before_the_model_is_loaded(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
):
    refuse_loading(monkeypatch)
    write_rows(Path("a.jsonl"), rows=20)
    with pytest.raises(
        UsageError, match=r"the validation data give no whole sequence of 128 tokens \(1 documents, 25 tokens\)"
    ):
        capture(teacher, "a.jsonl", seq_len=128)


def test_prompts_without_answers_are_continued_and_the_log_says_early_how_long_it_takes_and_what_is_cut(
    teacher: Path, said: list[str]
):
    prompts = "".join(json.dumps({"prompt": f"why {n}?"}) + "\n" for n in range(40))
    Path("prompts.jsonl").write_text(prompts)
    words = ["--teacher", str(teacher), "--data", "prompts.jsonl", "--out", "c"]
    assert parse("kdtrain cache-teacher", kd.CacheTeacherConfig, [*words, "--generate"], {}, problem).text.generate
    with pytest.raises(UsageError, match="has no column 'text'; give --text-column prompt"):
        parse("kdtrain cache-teacher", kd.CacheTeacherConfig, words, {}, problem)
    cache = capture(
        teacher, "prompts.jsonl", seq_len=16, text=TextConfig(generate=True, max_new_tokens=2), batch_size=4
    )
    assert cache.manifest.splits["train"]["sequences"] == 12
    assert any(re.fullmatch(r"the first 4 texts took \d+:\d\d: 14 take about \d+:\d\d", each) for each in said)
    early = "4 of the first 4 texts were cut before their end; --max-new-tokens or --seq-len gives more room"
    assert said.count(early) == 1

    Path("prompts.jsonl").write_text(prompts.replace("why", "w" * 99))
    shutil.rmtree("c")
    with pytest.raises(UsageError, match="no prompt of the train data leaves room in --seq-len 16; raise it"):
        capture(teacher, "prompts.jsonl", seq_len=16, text=TextConfig(generate=True))
