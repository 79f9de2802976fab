"""The folder of a run: whether it holds one, what may change on a resume, and the files beside the checkpoints."""

import json
import os
import select
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain import cli
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.commands import distill
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import CheckpointConfig, DataConfig, ObjectiveConfig, OptimizerConfig
from kdtrain.config.values import sections
from kdtrain.errors import UsageError
from kdtrain.files import make_writable, publish_json, temporary_name
from kdtrain.run.folder import claim_folder, launch, refuse_changes, restarted, to_toml, write_description


def temporary(name):
    return str(temporary_name(Path(name)))


def config_of(out, **changes):
    return DistillConfig(**{"student": "org/student", "out": Path(out), "cache": Path("c"), **changes})


def never(overwrite=False):
    return CheckpointConfig(resume="never", overwrite=overwrite)


@pytest.fixture
def run(tmp_path):
    """Make a folder with a run in it."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_description(config_of(folder), {})
    return folder


def test_a_folder_that_is_missing_or_empty_is_free_and_nothing_is_made_yet(tmp_path):
    assert claim_folder(config_of(tmp_path / "a" / "b")) is False
    assert not (tmp_path / "a").exists()
    (tmp_path / "empty").mkdir()
    assert claim_folder(config_of(tmp_path / "empty")) is False
    make_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_the_files_of_an_attempt_before_its_run_are_accepted(tmp_path):
    (tmp_path / "data").mkdir()
    assert claim_folder(config_of(tmp_path)) is False
    settings = CacheSettings(codec=CodecSpec(kind="tokens", vocab_size=300), seq_len=8, tokenizer_size=300)
    publish_json(tmp_path / "data" / "settings.json", settings.to_json(), "x")
    assert claim_folder(config_of(tmp_path)) is False


@pytest.mark.parametrize(
    "left",
    [
        (".training", "data/.building-0", "data/shards/"),
        ("data/.building-0", "data/.building-1", temporary("data/settings.json"), "data/shards/"),
        (temporary("config.toml"),),
        (temporary("environment.json"), ".training", "data/"),
    ],
)
def test_empty_files_after_a_kill_or_a_full_disk_are_accepted(tmp_path, left):
    for name in left:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text("")
    assert claim_folder(config_of(tmp_path)) is False
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"not a run \(data"):
        claim_folder(config_of(tmp_path))


@pytest.mark.parametrize(
    "name", ["data/notes.txt", "student/config.json", "checkpoints/step-00000001/x", "config.toml", "thesis.tex"]
)
def test_a_folder_that_only_looks_like_a_run_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=f"not a run .{name.split('/')[0]}"):
        claim_folder(config_of(tmp_path))


THEIRS = '{"python": "3", "platform": "x", "libraries": []}'


@pytest.mark.parametrize("environment", [None, "{}", '{"python": "3"}', "notes", THEIRS])
def test_a_folder_with_a_configuration_of_the_user_is_not_a_run(tmp_path, environment):
    (tmp_path / "config.toml").write_text("# mine\n" + to_toml(sections(config_of(tmp_path))))
    if environment is not None:
        (tmp_path / "environment.json").write_text(environment)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for checkpoint in (CheckpointConfig(), never(overwrite=True)):
        with pytest.raises(UsageError, match=r"not a run .config\.toml"):
            claim_folder(config_of(tmp_path, checkpoint=checkpoint))
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("text", ["# mine\n{}", "when = 2026-01-01\n{}", "{}when = 2026-01-01", "garbled"])
def test_a_file_of_the_user_s_in_a_run_is_moved_aside_before_a_new_one_takes_its_name(run, text):
    own = text.format((run / "config.toml").read_text())
    (run / "config.toml").write_text(own)
    (run / "environment.json").write_text("{}")
    write_description(config_of(run, steps=5), {})
    assert (run / "config.toml.old-1").read_text() == own
    assert (run / "environment.json.old-1").read_text() == "{}"
    write_description(config_of(run, steps=6), {})
    assert sorted(path.name for path in run.iterdir()) == [
        *("config.toml", "config.toml.old-1", "environment.json", "environment.json.old-1")
    ]


def test_an_earlier_run_is_resumed_and_a_kill_before_its_configuration_allows_a_second_attempt(run):
    assert claim_folder(config_of(run)) is True
    (run / "config.toml").unlink()
    assert claim_folder(config_of(run)) is False


def test_a_run_is_replaced_only_with_both_options_and_is_then_moved_aside(run):
    with pytest.raises(UsageError, match="--overwrite"):
        claim_folder(config_of(run, checkpoint=never()))
    for number in (1, 2):
        assert claim_folder(config_of(run, checkpoint=never(overwrite=True))) is False
        assert (run.parent / f"run.old-{number}" / "config.toml").exists()
        run.mkdir()
        write_description(config_of(run), {})


NEEDED = {
    "the current directory": lambda run: {},
    "--cache": lambda run: {"cache": run / "data"},
    "--cache by a link": lambda run: {"cache": run / "linked" / "cache"},
    "--load": lambda run: {"checkpoint": replace(never(overwrite=True), load=run / "checkpoints" / "best")},
    "--student": lambda run: {"student": str(run / "student")},
    "--student tokenizer": lambda run: {"student": str(run.parent / "s.toml")},
    "--student teacher source": lambda run: {"student": str(run.parent / "deep.toml")},
    "--data": lambda run: {"cache": None, "data": DataConfig(data=str(run / "text.txt"))},
}


@pytest.mark.parametrize("words", NEEDED)
def test_a_run_that_holds_what_the_new_one_needs_is_not_moved_aside(run, monkeypatch, words):
    for name in ("data", "student", "checkpoints/best"):
        (run / name).mkdir(parents=True)
    (run / "text.txt").write_text("a")
    (run / "student" / "config.json").write_text("{}")
    (run.parent / "elsewhere" / "cache").mkdir(parents=True)
    (run / "linked").symlink_to("../elsewhere")
    (run.parent / "s.toml").write_text("tokenizer = 'run/student'\n[config]\nmodel_type = 'llama'")
    (run.parent / "t.toml").write_text("source = 'run/student'")
    (run.parent / "deep.toml").write_text("init = 'teacher-layers'\nlayers = [0]\nteacher = 't.toml'")
    monkeypatch.chdir(run / "data" if words == "the current directory" else run.parent)
    before = sorted(run.parent.rglob("*"))
    config = config_of(run, **{"checkpoint": never(overwrite=True)} | NEEDED[words](run))
    words = words.removesuffix(" by a link")
    with pytest.raises(UsageError, match=f"run would be moved away or replaced, and {words} ?.*is in it"):
        claim_folder(config)
    assert sorted(run.parent.rglob("*")) == before


def test_a_run_keeps_the_links_of_wandb_and_none_to_another_place_for_it(run):
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("/nowhere")
    assert claim_folder(config_of(run)) is True
    (run / "wandb").rename(run.parent / "real")
    (run / "wandb").symlink_to("../real")
    with pytest.raises(UsageError, match="wandb is a link, and nothing is written through links"):
        claim_folder(config_of(run))


def test_a_run_behind_a_link_is_not_moved_aside_and_its_link_not_left_behind(run):
    (run.parent / "link").symlink_to("run")
    with pytest.raises(UsageError, match="link is a link; name the folder itself"):
        claim_folder(config_of(run.parent / "link", checkpoint=never(overwrite=True)))
    assert claim_folder(config_of(run.parent / "link")) is True
    assert run.is_dir()


def test_a_run_is_not_resumed_from_the_folder_that_its_export_will_replace(run, monkeypatch):
    (run / "student").mkdir()
    monkeypatch.chdir(run / "student")
    with pytest.raises(UsageError, match=r"student would be moved away or replaced, and the current directory is in"):
        claim_folder(config_of(".."))


def test_a_restart_by_torchrun_resumes_its_own_run_and_no_other(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    config = config_of(folder, checkpoint=never(overwrite=True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    write_description(config, {"launch": launch()})
    assert not restarted(config)  # the first try
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarted(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert not restarted(config)
    assert not restarted(config_of(tmp_path / "none", checkpoint=never()))


@pytest.mark.parametrize("answer, goes_on", [("\n", True), ("y\n", True), ("Yes\n", True), ("n\n", False), ("", True)])
def test_on_a_terminal_the_user_confirms_that_an_earlier_run_resumes(run, monkeypatch, answer, goes_on):
    person, terminal = os.openpty()
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        monkeypatch.setattr(sys, name, os.fdopen(os.dup(terminal), mode))
    os.write(person, answer.encode() or b"\x04")  # Ctrl-D
    monkeypatch.setattr(distill, "distill", lambda config: {})
    monkeypatch.setattr(DistillConfig, "show", lambda *page: None)
    monkeypatch.setattr(distill, "closing_page", lambda out, result: None)
    if goes_on:
        assert distill.main(config_of(run)) == 0
    else:
        with pytest.raises(UsageError, match="name another folder"):
            distill.main(config_of(run))
    shown = b""
    while b"Resume it?" not in shown:  # the terminal's echo, and what the command writes, come in parts
        assert select.select([person], [], [], 10)[0], shown
        shown += os.read(person, 4096)
    while select.select([person], [], [], 0.2)[0]:
        os.read(person, 4096)
    distill.main(config_of(run, checkpoint=CheckpointConfig(resume="latest")))
    monkeypatch.setenv("RANK", "0")
    distill.main(config_of(run))
    assert select.select([person], [], [], 0.2)[0] == [], "nothing more is asked"


def test_an_option_that_decides_the_result_may_not_change_and_is_named():
    before = OptimizerConfig(lr=3e-4)
    saved = json.loads(json.dumps(config_of("o", optimizer=before).deciding()))
    elsewhere = config_of("elsewhere", steps=9, micro_batch_size=4, optimizer=before)
    refuse_changes(saved, elsewhere, Path("o"), "step-00000004")
    changed = config_of("o", optimizer=OptimizerConfig(lr=0.5), objective=ObjectiveConfig(alpha=0.25), seed=3)
    with pytest.raises(UsageError) as caught:
        refuse_changes(saved, changed, Path("o"), "step-00000004")
    message = str(caught.value)
    assert "--lr (was 0.0003, now 0.5)" in message
    assert "--alpha (was auto, now 0.25)" in message
    assert "--seed (was 0, now 3)" in message and " (in step-00000004); give the same ones" in message
    assert "--betas" not in message


def test_an_option_that_the_checkpoint_does_not_know_had_its_default():
    saved = config_of("o").deciding()
    del saved["optimizer"]["clip"]
    refuse_changes(saved, config_of("o"), Path("o"), "step-00000004")
    with pytest.raises(UsageError, match=r"--clip \(was 1.0, now 2.0\)"):
        refuse_changes(saved, config_of("o", optimizer=OptimizerConfig(clip=2.0)), Path("o"), "step-00000004")


def test_the_options_of_an_earlier_version_resume_unless_one_that_is_fixed_now_had_another_value():
    saved = config_of("o").deciding()
    saved["guards"] |= {"spike_rule": "mad"}
    saved["objective"] |= {"temperature_schedule": "linear"}
    refuse_changes(saved, config_of("o"), Path("o"), "step-00000004")
    saved["objective"] |= {"temperature_mode": "schedule", "temperature_end": 2.0, "temperature_schedule": "cosine"}
    cosine = ObjectiveConfig(temperature_mode="cosine", temperature_end=2.0)
    refuse_changes(saved, config_of("o", objective=cosine), Path("o"), "step-00000004")
    saved["objective"] |= {"temperature_mode": "fixed", "temperature_end": 1.0, "temperature_schedule": "linear"}
    saved["guards"]["spike_rule"] = "none"
    with pytest.raises(UsageError, match=r"other options: --spike-rule is gone: .*--spike-patience 0.* \(in step"):
        refuse_changes(saved, config_of("o"), Path("o"), "step-00000004")


def test_the_written_configuration_is_read_back_by_the_command(tmp_path):
    config = config_of(tmp_path, steps=7, optimizer=OptimizerConfig(betas=(0.5, 0.25), lr=1e-6))
    config = replace(config, student='odd "name"\\with\n\u00e9 and \U0001f600')
    write_description(config, {"device": "cpu"})
    read = cli.parse("distill", ["--config", str(tmp_path / "config.toml")])
    assert replace(read, config=None) == config
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert environment["libraries"]["torch"]


def test_a_run_that_began_with_a_fixed_alpha_keeps_it_when_it_is_resumed(workbench):
    run = ("distill", "--cache", "cache", "--student", "student.toml", "--eval-batches", 1, *workbench.plain)
    workbench.json(*run, "--steps", 2, "--alpha", 0.9, "--out", "fixed")
    of_it = ("--load", "fixed/checkpoints/step-00000000")
    for out, more, kept in (("fixed", (), 0.9), ("later", of_it, "auto"), ("fresh", (), "auto")):
        code, _, err = workbench.call(*run, *more, "--steps", 3, "--out", out)
        begins = "alpha kl + (1 - alpha) ce, alpha by" if kept == "auto" else ".9 kl + .1 ce, as it began"
        assert code == 0 and f"loss = {begins}" in " ".join(err.split()), err
        saved = tomllib.loads((workbench.root / out / "config.toml").read_text())
        assert saved["objective"]["alpha"] == kept
    code, _, err = workbench.call(*run, "--steps", 4, "--alpha", 0.5, "--out", "fixed")
    assert code == 2 and "--alpha (was 0.9, now 0.5)" in err
    workbench.json(*run, "--steps", 2, "--alpha", 0.5, "--out", "half")
    code, _, err = workbench.call(*run, "--steps", 3, "--alpha", "auto", "--out", "half")
    assert code == 2 and "--alpha (was 0.5, now auto)" in err


def test_the_options_of_text_are_not_written_where_a_cache_brings_its_own(tmp_path):
    write_description(config_of(tmp_path), {})
    assert "data" not in tomllib.loads((tmp_path / "config.toml").read_text())
    write_description(replace(config_of(tmp_path), cache=None, data=DataConfig(data="stdlib", seq_len=64)), {})
    assert tomllib.loads((tmp_path / "config.toml").read_text())["data"]["seq_len"] == 64


values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
values |= st.floats(allow_nan=False, allow_infinity=False) | st.lists(st.text(), max_size=3)


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), values, max_size=4))
def test_whatever_options_hold_is_read_back_from_toml(table):
    table.pop("config", None)
    kept = {name: value for name, value in table.items() if value is not None}
    assert tomllib.loads(to_toml({"section": table})) == {"section": kept}
