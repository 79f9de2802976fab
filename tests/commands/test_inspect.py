"""The output of `kdtrain inspect` for a cache."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kdtrain.cache.format.manifest import Manifest, read_manifest
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.facts import cache_facts, fidelity, parent_lines, tail_rule
from kdtrain.checkpoint.store import Store
from kdtrain.commands.inspect import main
from kdtrain.config.commands import InspectConfig
from kdtrain.errors import UsageError
from kdtrain.files import Lock
from kdtrain.monitor.facts import closing_page
from kdtrain.tables import duration, number, short, show, show_page, size
from tests.logged_runs import write_lines, write_run

CACHE = Path(__file__).parents[1] / "golden" / "cache" / "sparse"


@pytest.fixture
def found() -> dict:
    """Return the fidelity of the cache."""
    return read_manifest(CACHE).fidelity or {}


def manifest_with(**changed: object) -> Manifest:
    return dataclasses.replace(read_manifest(CACHE), **changed)  # type: ignore[arg-type]


def test_a_cache_is_shown_with_a_row_of_fidelity_for_each_temperature_and_tail_rule(capsys, found: dict) -> None:
    assert main(InspectConfig(path=CACHE)) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(CACHE) not in line) <= 90
    rows = [line.split() for line in printed.splitlines()]
    for temperature in ("1", "2", "4"):
        own = found[f"T={temperature}"]
        assert f"{own['kl_spread']:.2g} at T={temperature}" in printed
        for rule, each in own["gradient"].items():
            token = [f"{each['token_angle']:.1f}°", f"{each['token_norm']:.2f}"]
            least = each["mean_angle"] * (found["sample"]["tokens"] / 8192) ** 0.5
            mean = [f"{least:.1f}°", "to", f"{each['mean_angle']:.1f}°", f"{each['mean_norm']:.2f}"]
            assert [temperature, rule, *token, *mean] == next(row[:8] for row in rows if row[:2] == [temperature, rule])
    assert f"{found['sample']['tokens']:,} tokens of {found['split']}" in printed
    assert "error of log Z at most" in printed and "for T from 0.6667 to 4" in printed
    facts = {line[:15].strip(): line[15:].strip() for line in printed.splitlines()}
    assert facts["tail rule"] == "sampled by default, or --tail control-variate" and facts["bytes per token"] == "649"
    assert facts["validation"] == "2 sequences of 24, 48 tokens, 1 shard, 35 KiB"
    assert main(InspectConfig(path=CACHE, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"] == found


@pytest.mark.parametrize(
    "tokens, angle, ratio, between, words",
    [
        (128, 10.2, 1.0, "1.3° to 10.2°", "too few to tell"),
        (768, 4.9, 1.0, "1.5° to 4.9°", "too few to tell"),
        (4096, 2.4, 1.0, "1.7° to 2.4°", "the same"),
        (4096, 2.4, 1.04, "1.7° to 2.4°", "too few to tell"),
        (4096, 25.0, 1.0, "17.7° to 25.0°", "another way"),
        (512, 0.1, 1.0, "0.0° to 0.1°", "too few to tell"),
        (8192, 3.9, 0.98, "3.9°", "a little off"),
    ],
)
def test_words_for_an_angle_are_those_of_all_angles_that_as_many_tokens_allow(
    found: dict, tokens: int, angle: float, ratio: float, between: str, words: str
) -> None:
    gradient = {"token_angle": 12.5, "token_norm": 1.0, "mean_angle": angle, "mean_norm": ratio}
    found |= {"sample": {"tokens": tokens}, "T=1": {"kl_spread": 0.1, "gradient": {"ghost": gradient}}}
    (table,) = (each for each in fidelity(manifest_with(fidelity=found)) if not isinstance(each, str))
    assert list(table.rows[0])[4:] == [between, f"{ratio:.2f}", words]


def test_a_divergence_is_what_a_cache_does_not_know_of_the_tail_and_not_its_rounding(found: dict) -> None:
    def text(rule: str) -> str:
        own = {**found["T=1"], "gradient": {rule: found["T=1"]["gradient"][rule]}}
        kept = {name: each for name, each in found.items() if not name.startswith("T=")}
        return "\n".join(map(str, fidelity(manifest_with(fidelity={**kept, "T=1": own}))))

    assert "KL(full || cache), the tail's mass spread evenly: 0.95 at T=1" in text("ghost")
    assert "KL(full" not in text("sampled") and "2.3e-06" not in text("ghost")


def test_a_fidelity_that_kdtrain_did_not_write_is_left_out(found: dict) -> None:
    for odd in ({}, {"T=1": []}, {**found, "T=1": {"gradient": {"ghost": {}}}}, {**found, "sample": {"tokens": "x"}}):
        assert fidelity(manifest_with(fidelity=odd)) == []


def test_a_warning_is_shown_whole_and_a_very_long_one_ends_between_words(tmp_path, capsys) -> None:
    message = "shard train-00000 is not what the manifest states, and was not kept: name a revision, or ask its author"
    run = write_run(tmp_path / "run")
    (run / "checkpoints").mkdir()
    for kind, text in (("short", 2 * f"{message} "), ("long", "word " * 500)):
        write_lines(run / "events.jsonl", [{"event": kind, "level": "warning", "step": 3, "message": text}])
    assert main(InspectConfig(path=run)) == 0
    shown = capsys.readouterr().out
    assert f"@3: {message} {message}" in " ".join(shown.split())
    assert 190 < shown.count("word") <= 200 and "word ..." in " ".join(shown.split())


def test_a_shard_is_shown_by_the_record_beside_it_from_inside_of_its_folder_too(monkeypatch, capsys) -> None:
    for path in (CACHE / "shards" / "train-00001.h5", Path("train-00001.h5")):
        assert main(InspectConfig(path=path, json=True)) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["split"], shown["cache"]) == ("train", str(CACHE)) and shown["stored (MiB)"]["ids"] > 0
        monkeypatch.chdir(CACHE / "shards")


def save_checkpoint(run: Path) -> None:
    """Save a whole checkpoint of step 40 of one small tensor."""
    state = {"cache": "c", "options": {}, "student": {"name": "s", "architecture": {}, "attention": "sdpa"}}
    state |= {"progress": {"step": 40}, "watchers": {}, "teacher": None}
    Store(run / "checkpoints").save("step-00000040", 40, {"student.w": torch.zeros(5)}, state)


def test_json_of_a_run_needs_none_of_its_logs(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert main(InspectConfig(path=run, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["student"]["name"] == "s"
    with pytest.raises(UsageError, match="see whether --json shows it"):
        main(InspectConfig(path=run))


def closing(run: Path, result: dict, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show_page(closing_page(run, result))
    return capsys.readouterr().out.splitlines()


def test_distill_ends_with_a_short_page_that_fits_into_80_columns(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    run = write_run(Path("runs/a"), final=2.5)
    result = {
        **json.loads((run / "result.json").read_text()),
        "first_validation_loss": 3.5,
        "best_step": 40,
        "cross_entropy_validation_loss": 2.7,
        "cross_entropy_run": "runs/plain",
        "seconds": 130.0,
        "tokens": 1_966_080,
        "warnings": {"no-gain": 1, "slow": 2},
        "student": "runs/a/student",
    }
    lines = closing(run, result, capsys)
    assert max(map(len, lines)) <= 80 and len(lines) <= 11, lines
    assert lines[0].startswith("runs/a: done at step 40 of 40, 2:10 of training, 1.97 M tokens")
    row = ["nats", "per", "token", "3.500", "2.500", "@40", "2.500", "@40", "1.500", "2.700"]
    assert row in [line.split() for line in lines]
    assert lines[-1] == 'Next: kdtrain generate runs/a "def main("'
    (run / "student").mkdir()
    (run / "student" / "chat_template.jinja").write_text("{{ messages }}")
    assert closing(run, result, capsys)[-1] == "Next: kdtrain chat runs/a"
    text = "\n".join(lines)
    for part in (
        "1 no-gain, 2 slow",
        "val @40: KL to the teacher 1.000",
        "ECE 5.0 %",
        "runs/a/student",
        "runs/a/result.json",
    ):
        assert part in text


def test_a_stopped_run_ends_with_the_command_that_resumes_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("runs/a"))
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"validation/kl": 1.0', '"validation/kl": -0.014'))
    stopped = {"run": "runs/a", "stop_reason": "signal", "stopped_by": "SIGINT"}
    resumes = "Next: kdtrain distill --config runs/a/config.toml"
    assert closing(run, stopped, capsys) == ["runs/a: stopped by SIGINT while not training", resumes]
    lines = closing(run, {**stopped, "step": 20, "steps": 40}, capsys)
    assert lines[0] == "runs/a: stopped by SIGINT at step 20 of 40" and lines[-1] == resumes
    assert "KL to the teacher -0.014 (an estimate from samples)" in "\n".join(lines)


@pytest.mark.parametrize(
    "spec, says, follows",
    [
        ("stdlib-5m", "stdlib-5m: stdlib-5m, the weights of ", "cache-teacher --teacher stdlib-5m"),
        ("stdlib-1m", "stdlib-1m: stdlib-1m, a llama, fresh weights", "distill --cache CACHE --student stdlib-1m"),
        ("mine.toml", "mine.toml: mine, a gpt2, fresh weights", "distill --cache CACHE --student mine.toml"),
        ("lora.toml", "lora.toml: lora, the weights of Org/Base\ntrains LoRA of rank 8 (alpha 32 / rank)", "lora.toml"),
    ],
)
def test_a_recipe_is_shown_with_the_command_that_takes_it(monkeypatch, capsys, tmp_path, spec, says, follows):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("name = 'mine'\ninit = 'scratch'\n[config]\nmodel_type = 'gpt2'\nn_layer = 2\n")
    Path("lora.toml").write_text("name = 'lora'\nsource = 'Org/Base'\n[lora]\nrank = 8\n")
    assert main(InspectConfig(path=Path(spec))) == 0
    shown = capsys.readouterr().out
    assert main(InspectConfig(path=Path(spec), json=True)) == 0
    assert json.loads(capsys.readouterr().out).get("lora") == ({"lora_rank": 8} if spec == "lora.toml" else None)
    assert shown.startswith(says) and follows in shown
    assert ("n_layer 2" in shown) == (spec == "mine.toml")


def test_pages_and_specs_are_read_without_torch(tmp_path):
    write_run(tmp_path / "run")
    asked = ["stdlib-1m", str(CACHE), str(tmp_path / "run"), str(tmp_path), str(CACHE / "shards" / "train-00001.h5")]
    program = (
        "import sys; from kdtrain.cli import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "finally: print(*{'torch', 'transformers', 'h5py'} & sys.modules.keys(), file=sys.stderr)"
    )
    for path in asked:
        done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr.strip()) == (0, "") and done.stdout, path


def test_the_page_of_a_run_says_what_is_trained_and_the_routers_part_of_the_loss(capsys, tmp_path):
    path = write_run(tmp_path / "run", divergence="forward-kl", alpha=0.9) / "environment.json"
    environment = json.loads(path.read_text())
    trained = {"trained": "LoRA of rank 4 (alpha 32 / rank) on all-linear", "trained_parameters": 12_345}
    environment["student"] |= trained | {"router_weight": 0.5}
    path.write_text(json.dumps(environment))
    save_checkpoint(path.parent)
    for split, ece in (("test", 0.9), ("test", 0.5), ("validation", 0.0125)):
        found = {"step": 40, "checkpoint": f"best-{split}", "split": split, "cache": "cd" * 32, "ece": ece}
        write_lines(path.parent / "evaluations.jsonl", [{**found, "sequences": 8, "kl": None, "x": [1], "odd": "\x1b"}])
    assert main(InspectConfig(path=path.parent)) == 0
    out = capsys.readouterr().out
    rows = {line[0]: line[1:] for each in out.splitlines() if (line := re.split("  +", each.strip()))}
    assert rows["checkpoint"] == ["best-test", "best-validation"] and rows["split"] == ["test", "validation"]
    assert rows["ECE (15 bins), %"] == ["50.00", "1.25"] and rows["cache"] == ["cdcdcdcdcdcd"] * 2
    assert not rows.keys() & {"KL to the teacher, nats", "x", "step"} and rows["odd"] == ["\\x1b"] * 2
    assert "val @40: KL to the teacher 1.000" in out and main(InspectConfig(path=path.parents[1])) == 0
    listed = capsys.readouterr().out
    assert "test: 8 sequences of the test split of the cache cdcdcdcdcdcd; of each student best-test" in listed
    shown = " ".join(out.split())
    assert "(12.3k trained: LoRA of rank 4 (alpha 32 / rank) on all-linear)" in shown
    assert ".9 kl + .1 ce + .5 router" in shown


def test_a_folder_lists_its_runs_and_caches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(InspectConfig(path=CACHE.parent)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sparse", "-", "the", "4", "most", "likely", "entries", "and", "6", "samples", "168"] in rows
    assert ["sparse", "649"] in rows


def test_the_folder_of_a_sweep_lists_its_runs_and_caches_by_arm_and_seed(tmp_path, capsys) -> None:
    write_run(tmp_path / "s/kd/seed-0")
    shutil.copytree(CACHE, tmp_path / "s/caches/c")
    with pytest.raises(UsageError, match="is neither a cache nor a run"):
        main(InspectConfig(path=tmp_path / "s"))
    (tmp_path / "s/sweep.json").write_text("{}")
    assert main(InspectConfig(path=tmp_path / "s", json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (list(found["runs"]), list(found["caches"])) == (["kd/seed-0"], ["caches/c"])
    assert found["runs"]["kd/seed-0"]["state"] == "done"
    result = tmp_path / "s/kd/seed-0/result.json"
    result.write_text(result.read_text().replace('"done"', '"early-stop"'))
    assert main(InspectConfig(path=tmp_path / "s")) == 0
    assert "early stop" in capsys.readouterr().out
    result.write_text(result.read_text().replace('"early-stop"', '"training"'))  # no state in which `--watch` waits
    assert main(InspectConfig(path=tmp_path / "s", json=True)) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["kd/seed-0"]["state"] == "done"
    assert found["runs"]["kd/seed-0"]["last_validation_loss"] == 2.0


def test_an_unfinished_cache_is_shown_with_its_progress_and_followed_until_it_is_finished(
    tmp_path, capsys, monkeypatch
) -> None:
    def shown(path: Path, **options: bool) -> str:
        assert main(InspectConfig(path=path, **options)) == 0
        return " ".join(capsys.readouterr().out.split())

    caches = tmp_path / "caches"
    cache = Path(shutil.copytree(CACHE, caches / "cache"))
    shutil.copytree(CACHE, caches / "whole")
    ours = cache / "manifest.json", cache / "shards/validation-00000.json", cache / "shards/validation-00000.h5"
    for each in ours:
        each.rename(tmp_path / each.name)
    killed = (
        "2 of 3 shards (71%), 120 tokens, 71 KiB, no process is seen to make it Next: the command that began it, again"
    )
    assert shown(cache) == f"{cache}: unfinished, the 4 most likely entries and 6 samples of a teacher a token {killed}"
    rows = shown(caches)
    assert "168 649 cache: unfinished, the 4 most likely entries and 6 samples of a teacher a token, 2 of" in rows
    watched = shown(cache, watch=True)
    assert watched == killed.partition(" Next")[0]

    lock = Lock(cache / ".building-0", "")
    ages = {"shards/train-00000.json": 90, ".building-0": 60, "shards/train-00001.json": 0}  # one of an earlier attempt
    for name, age in ages.items():
        os.utime(cache / name, (time.time() - age, time.time() - age))
    found = json.loads(shown(cache, json=True))
    assert found["making"] and found["sequences"] == 5 and found["shards requested"] == 3
    assert found["tokens_per_second"] == pytest.approx(2 * 24 / 60, rel=1e-3) and 50 < found["seconds left"] <= 60

    def finish(seconds: float) -> None:
        lock.release()
        for each in ours:
            (tmp_path / each.name).rename(each)

    monkeypatch.setattr("time.sleep", finish)
    watched = shown(cache, watch=True)
    assert "being made, 1 tok/s, " in watched and " left finished: the 4 most likely entries and 6 samples" in watched

    ours[0].unlink()
    (cache / "shards/train-00000.h5").write_bytes(b"short")
    (cache / "shards/train-00001.json").write_text("{}")
    assert "1 of 3 shards (29%), 48 tokens, 35 KiB, 2 damaged, which are made again, no process" in shown(cache)
    (cache / "settings.json").write_text("{}")
    with pytest.raises(UsageError, match=r"settings.json was altered or damaged \(.*run kdtrain verify"):
        main(InspectConfig(path=cache))
    assert "cannot be read: " in shown(caches)
    with pytest.raises(UsageError, match=r"--watch is for runs and caches; .* is a folder"):
        main(InspectConfig(path=caches, watch=True))


def test_numbers_sizes_durations_and_counts_are_written_as_people_write_them():
    written = {16384.0: "16,384", 5.92412: "5.924", 0.029052: "0.02905", 3.14e-5: "3.1e-05", 1605.9: "1,606"}
    written |= {1.5e300: "1.5e+300", -(10**400): "-1e+300", 12: "12", float("nan"): "nan", None: "-"}
    assert {value: number(value) for value in written} == written and number(True) == "-"
    written = {0.0: "0 MiB", 0.05: "51 KiB", 0.25: "0.2 MiB", 4: "4 MiB", 12.1: "12 MiB", 2048: "2 GiB"}
    assert {value: size(value) for value in written} == written
    written = {9: "0:09", 751: "12:31", 7500: "2 h 05", 200000: "2 d 07 h", None: "-"}
    assert {value: duration(value) for value in written} == written
    written = {12: "12", 999.9: "1.0k", 12234: "12.2k", 1053824: "1.05 M", 2.5e9: "2.50 G"}
    assert {value: short(value) for value in written} == written


def test_the_control_variate_is_offered_where_there_is_a_top_k():
    kinds = {"top_k": 8, "num_samples": 24}, {"num_samples": 50}, {"top_k": 12}
    settings = read_manifest(CACHE).settings
    codecs = (CodecSpec(kind="sparse", vocab_size=64, **kind) for kind in kinds)
    offered = [tail_rule(manifest_with(settings=dataclasses.replace(settings, codec=codec))) for codec in codecs]
    assert offered == ["sampled by default, or --tail control-variate", "sampled", "ghost"]


def test_of_very_many_reasons_or_parents_some_are_listed_and_the_others_counted() -> None:
    for reasons, more in ((20, None), (20_000, "... and 19,980 more")):
        counts = {"train": {f"left out {place}": 7 for place in range(reasons)}, "test": {}}
        text = cache_facts(manifest_with(text_counts=counts))["left out of the text"]
        listed = [f"train: 7 left out {place}" for place in range(20)]
        assert text.split("; ") == [*listed, *([more] if more else [])]
    parent = {"digest": "0" * 64, "teacher": None, "num_samples": 0, "weight": 1.0, "sequences": {"train": 1}}
    lines = list(parent_lines(manifest_with(parents=[parent] * 20_000), 50))
    assert lines == ["000000000000 of no teacher, 1 sequence of train"] * 50 + ["... and 19,950 more, in manifest.json"]
    assert len(list(parent_lines(manifest_with(parents=[parent] * 50), 50))) == 50


@pytest.mark.parametrize(
    "origin", [{"x": 1}, {"source": [1], "layout": {}, "shift": "a", "kept_mass": [], "unknown": 5}, {"unknown": [{}]}]
)
def test_the_facts_of_a_cache_with_an_odd_origin_are_text(origin: dict) -> None:
    facts = cache_facts(manifest_with(origin=origin))
    assert "imported from" in facts and all(isinstance(text, str) for text in facts.values())


def test_untrusted_names_are_shown_without_control_characters_or_markup(capsys):
    show("verify t/[/b]", {"[/red]": ["[/b] \x1b[2J", "\ud800"], "[b]versions[/b]": "x"}, as_json=False)
    shown = capsys.readouterr().out
    for each in ("verify t/[/b]", "[/red]", "[/b] \\x1b[2J", "\\ud800", "[b]versions[/b]"):
        assert each in shown
    assert "\x1b[2J" not in shown and len(shown.splitlines()) == 5
