"""`kdtrain find-lr`: its short runs are runs of distill, it resumes, and it says what it found in a few lines."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from kdtrain import faults
from kdtrain.config import rates
from kdtrain.config.commands import DistillConfig
from kdtrain.config.sections import DataConfig, LoraConfig, ObjectiveConfig, OptimizerConfig, QuantizationConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.library import Cache
from kdtrain.parallel import memory_plan
from kdtrain.parallel.footprint import model_footprint
from kdtrain.plugins.find_lr import FindLrConfig
from kdtrain.plugins.find_lr import command as find_lr
from kdtrain.plugins.find_lr.search import Trained, next_run
from kdtrain.run.recipe import student_spec, table_rate
from kdtrain.tokenizers.view import View
from tests.token_kinds import train

OPTIONS = ("--cache", "cache", "--student", "student.toml", "--steps", 80, "--rung-steps", 4, "--eval-batches", 1)
AROUND = ("--lr", 3e-2)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do once what costs most of a run of four steps: its plan of memory."""
    measured = {}

    def footprint(spec, **how):
        key = repr((spec, how))
        if key not in measured:
            measured[key] = model_footprint(spec, **how)
        return measured[key]

    monkeypatch.setattr(memory_plan, "footprint_of", footprint)


def searched(workbench, out, *more, **how):
    return workbench.call("find-lr", *OPTIONS, *workbench.plain, "--out", out, *more, **how)


@pytest.fixture
def whole(workbench, monkeypatch):
    """Search in `lr`, stop in the seventh run and resume; return the record.

    `cut.json` holds the record when it stopped.
    """
    path = workbench.root / "lr/find-lr.json"
    if not path.exists():
        monkeypatch.setattr(faults, "_faults", {"train.after-step": ("term", "35")})
        monkeypatch.setattr(faults, "_calls", Counter())
        code, _, err = searched(workbench, "lr", *AROUND)
        assert code == 1 and "the same command resumes" in err.splitlines()[-1]
        monkeypatch.setattr(faults, "_faults", {})
        cut = json.loads(path.read_text())
        cut["written"] = {each: result_of(workbench, each).stat().st_mtime_ns for each in cut["runs"]}
        (workbench.root / "cut.json").write_text(json.dumps(cut))
        code, _, err = searched(workbench, "lr", *AROUND)
        assert code == 0, err
    return json.loads(path.read_text())


def result_of(workbench, exponent, steps=4):
    return workbench.root / f"lr/lr-{3e-2 * 2.0 ** int(exponent):.4g}-{steps}/result.json"


def plain(workbench, rate, steps):
    """Return the last validation loss of `distill` in fewer steps than 80, half of which are its warm-up."""
    options = ("--lr", rate, "--warmup-steps", steps // 2, "--steps", steps)
    data = ("--cache", "cache", "--student", "student.toml", "--eval-batches", 1)
    answer = workbench.json("distill", *data, *options, *workbench.plain, "--out", f"plain-{rate:g}-{steps}")
    return answer["last_validation_loss"]


def of_run(workbench, out, name):
    return json.loads((workbench.root / out / name).read_text())


def test_it_ends_with_a_table_a_figure_a_record_and_the_flag_in_eleven_lines(workbench, whole):
    code, out, err = searched(workbench, "lr", *AROUND)  # nothing is trained again
    lines = out.splitlines()
    assert code == 0 and 8 <= len(lines) <= 11 and max(map(len, lines)) <= 80
    assert "validation loss" not in err, "no short run is trained again"
    suggested = whole["suggestion"]
    assert lines[-1].startswith(f"Next: kdtrain distill ... --lr {suggested['lr']:.2g}")
    low, high = suggested["between"]
    assert low <= suggested["lr"] * 1.05 and suggested["lr"] <= high * 1.05
    losses = {rate: whole["runs"][name][-1]["loss"] for name, rate in whole["rates"].items()}
    longest = {rate for name, rate in whole["rates"].items() if len(whole["runs"][name]) == 2}
    assert suggested["best"] == min(longest, key=losses.get) and len(longest) >= 3
    assert (workbench.root / "lr/find-lr.png").stat().st_size > 5000
    assert whole["cost"]["steps"] == whole["cost"]["share_of_the_run"] * 80
    assert len(whole["runs"]["0"][0]["parts"]) == 8, "a part for each validation sequence"
    assert workbench.json("find-lr", *OPTIONS, *workbench.plain, "--out", "lr", *AROUND)["suggestion"] == suggested


def test_a_short_run_is_one_of_distill_with_the_shape_of_the_whole_one(workbench, whole):
    best = whole["suggestion"]["best"]
    name = next(name for name, rate in whole["rates"].items() if rate == best)
    assert whole["rungs"] == [4, 12] and whole["runs"][name][1]["loss"] == plain(workbench, best, 12)
    folder = workbench.root / f"lr/lr-{best:.4g}-12"
    assert (folder / "config.toml").is_file() and not (folder / "student").exists()
    assert len(list((folder / "checkpoints").glob("step-*"))) <= 3


def test_a_search_that_is_stopped_goes_on_where_it_was_and_trains_nothing_again(workbench, whole):
    cut = of_run(workbench, ".", "cut.json")
    losses = {int(name): [Trained(each["loss"]) for each in rungs] for name, rungs in cut["runs"].items()}
    rate, rung = next_run(losses)  # which was stopped at its third step
    assert len(losses) >= 5 and "suggestion" not in cut
    assert whole["runs"][str(rate)][rung]["loss"] == plain(workbench, whole["rates"][str(rate)], whole["rungs"][rung])
    left = {name for name, rungs in cut["runs"].items() if len(rungs) == len(whole["runs"][name])}
    assert left and all(whole["runs"][name] == cut["runs"][name] for name in left)
    assert all(result_of(workbench, name).stat().st_mtime_ns == cut["written"][name] for name in left)


def test_a_search_that_is_stopped_in_its_first_run_goes_on_and_one_that_is_refused_leaves_nothing(
    workbench, monkeypatch
):
    monkeypatch.setattr(faults, "_faults", {"train.after-step": ("term", "2-2")})
    for calls in (1, 2):
        monkeypatch.setattr(faults, "_calls", Counter())
        code, _, err = searched(workbench, "early", *AROUND)
        assert code == 1 and "the same command resumes" in err.splitlines()[-1], (calls, err)
    assert of_run(workbench, "early", "find-lr.json")["runs"] == {}
    code, _, err = searched(workbench, "early", *AROUND, "--seed", 3)
    assert code == 2 and "holds another search (--seed was 0)" in err
    code, _, err = searched(workbench, "refused", *AROUND, "--batch-size", 5, "--micro-batch-size", 2)
    assert code == 2 and "is not a multiple" in err and not (workbench.root / "refused").exists()


def test_it_begins_from_a_model_folder_which_has_no_schedule_to_override(workbench, monkeypatch):
    monkeypatch.setattr(faults, "_faults", {"train.after-step": ("term", "2")})
    monkeypatch.setattr(faults, "_calls", Counter())
    options = ("find-lr", *OPTIONS[:2], "--student", "teacher", *OPTIONS[4:], *workbench.plain)
    code, _, err = workbench.call(*options, "--load", "teacher", "--out", "from")
    assert code == 1 and "the same command resumes" in err.splitlines()[-1], err
    assert of_run(workbench, "from", "find-lr.json")["guess_from"].startswith("pretrained weights, ")
    (workbench.root / "adapters-of").mkdir()
    (workbench.root / "adapters-of/adapter_config.json").write_text("{}")
    for folder in ("teacher", "adapters-of"):
        code, _, err = workbench.call(*options, "--load", folder, "--out", "no", "--override-opt-param-scheduler")
        assert code == 2 and "--override-opt-param-scheduler has no effect with the" in err.splitlines()[-1], err


def test_a_short_run_has_the_schedules_of_the_whole_one_in_fewer_steps(tmp_path):
    config = FindLrConfig(
        student="student.toml",
        cache=("cache",),
        out=tmp_path / "lr",
        steps=40,
        objective=ObjectiveConfig(alpha=0.0, alpha_schedule="linear", alpha_end=0.5),
        optimizer=OptimizerConfig(lr=0.1, lr_schedule="wsd", warmup_steps=4, decay_steps=20),
        quantization=QuantizationConfig(time_resume=True, quant_rule="schedule"),
    )
    short = find_lr.short_run(config, tmp_path / "lr/lr-1e-07-10", 1e-7, 10, 40)
    assert (short.objective, short.quantization) == (config.objective, config.quantization)
    given = (short.steps, short.optimizer.warmup_steps, short.optimizer.decay_steps, short.optimizer.min_lr)
    assert given == (10, 1, 5, 1e-7) and short.optimizer.lr_schedule == "wsd"


@pytest.mark.parametrize("reason", ["diverged", "non-finite", "gradient-explosion"])
def test_a_rate_that_diverges_is_infinite_and_moves_the_search_to_lower_ones(workbench, monkeypatch, reason):
    def train(config, finish):
        config.out.mkdir()
        lr = config.optimizer.lr
        result = {"stop_reason": "done", "cache": "c", "last_validation_loss": math.log(lr) ** 2, "seconds": 1.0}
        (config.out / "result.json").write_text(json.dumps(result))
        if lr > 2:
            raise RunError("too far", reason=reason)
        return result

    monkeypatch.setattr(find_lr, "train", train)
    code, _, err = searched(workbench, f"high-{reason}", "--lr", 4.0)
    assert code == 0 and "lr 16, 4 steps: diverged" in err, err
    found = of_run(workbench, f"high-{reason}", "find-lr.json")
    diverged = {rate for name, rate in found["rates"].items() if found["runs"][name][0]["loss"] is None}
    assert diverged == {4.0, 8.0, 16.0} and found["suggestion"]["best"] == 1.0
    assert all(len(rungs) == 1 for rungs in found["runs"].values() if rungs[0]["loss"] is None)


def test_a_failure_that_the_rate_does_not_explain_is_one(workbench, monkeypatch):
    def train(config, finish):
        raise RunError("no space", reason="disk")

    monkeypatch.setattr(find_lr, "train", train)
    code, _, err = searched(workbench, "full", *AROUND)
    assert code == 1 and err.splitlines()[-1] == "kdtrain: no space"


@pytest.mark.parametrize(
    "more, said",
    [
        (("--out", "plain-run"), "holds a run, which find-lr leaves alone"),
        (("--out", "strange"), "holds something else (notes.txt)"),
        (("--out", "lr", "--seed", 3), "holds another search (--seed was 0)"),
        (("--out", "lr", "--rung-steps", 5), "holds another search (--rung-steps was 4)"),
        (("--out", "new", "--dry-run"), "are for distill"),
        (("--out", "new", "--resume", "never"), "find-lr resumes its own short runs"),
        (("--out", "new", "--load", "plain-run"), "add --override-opt-param-scheduler"),
    ],
    ids=lambda each: " ".join(map(str, each)) if isinstance(each, tuple) else "",
)
def test_what_it_cannot_do_is_refused_in_one_line_and_changes_nothing(workbench, whole, more, said):
    if not (workbench.root / "plain-run").exists():
        data = ("--cache", "cache", "--student", "student.toml", "--steps", 1)
        workbench.json("distill", *data, *workbench.plain, "--out", "plain-run")
        (workbench.root / "strange").mkdir()
        (workbench.root / "strange/notes.txt").write_text("mine")
    before = workbench.everything()
    code, out, err = workbench.call("find-lr", *OPTIONS, *workbench.plain, *AROUND, *more)
    assert (code, out) == (2, "") and said in err.splitlines()[-1], err
    assert workbench.everything() == before


@pytest.mark.parametrize("text", ["{", '{"runs": 3}', "[]", '{"guess": 1e999}'])
def test_a_record_that_somebody_else_wrote_is_refused(workbench, text):
    (workbench.root / "theirs").mkdir(exist_ok=True)
    (workbench.root / "theirs/find-lr.json").write_text(text)
    code, _, err = searched(workbench, "theirs", *AROUND)
    assert code == 2 and "find-lr.json: " in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("kind", ["text", "words"])
def test_text_and_the_rows_of_another_tokenizer_are_made_once_and_move_on_from_run_to_run(workbench, kind):
    root = workbench.root
    options = ("--data", "text.txt", "--seq-len", 32, "--num-workers", 0, "--validation-sequences", 8)
    options += ("--num-sequences", 16, "--student", "student.toml", "--steps", 40, "--rung-steps", 2)
    if kind == "words":
        train("gpt2", 400, (root / "text.txt").read_text()).save_pretrained(root / "words")
        (root / "words.toml").write_text((root / "student.toml").read_text().replace("'teacher'", "'words'"))
        options = ("--cache", "cache", "--student", "words.toml", "--cross-tokenizer", "--epochs", 2, "--rung-steps", 2)
    code, _, err = workbench.call("find-lr", *options, *workbench.plain, *AROUND, "--out", f"{kind}-lr")
    assert code == 0, err
    (data,), ended = (root / f"{kind}-lr").glob("lr-*/data"), [*(root / f"{kind}-lr").glob("lr-*/result.json")]
    assert len(ended) >= 7
    first = min(each.stat().st_mtime_ns for each in ended)
    assert all(each.stat().st_mtime_ns < first for each in data.rglob("train-*"))
    if kind == "words":
        rows = View(data, Cache("cache"))["train"]
        assert of_run(workbench, "words-lr", "find-lr.json")["planned"] == round(2 * len(rows) / 8)


# The rate of `--lr auto` ---------------------------------------------------------------------------------------------


def rate_of_run(workbench, out):
    """Read a run's rate, where it is from, and the log, in the files of the run."""
    text = (workbench.root / out / "config.toml").read_text()
    (number,) = [line.removeprefix("lr = ") for line in text.splitlines() if line.startswith("lr = ")]
    environment = of_run(workbench, out, "environment.json")["lr"]
    return float(number), environment["from"], (workbench.root / out / "train.log").read_text()


SHORT = ("--cache", "cache", "--steps", 2, "--eval-batches", 1)


def test_a_run_without_a_rate_says_which_one_it_takes_and_keeps_it_when_the_table_changes(workbench, monkeypatch):
    options = ("distill", *SHORT, "--student", "student.toml", *workbench.plain, "--out", "auto")
    planned = workbench.json(*options, "--dry-run")
    assert planned["learning rate"].startswith("0.002 (auto: fresh weights, ")
    workbench.json(*options)
    rate, told, log = rate_of_run(workbench, "auto")
    assert rate == 2e-3 and told.startswith("fresh weights, ") and "lr 0.002 (auto: fresh weights, " in log
    saved = json.loads(next((workbench.root / "auto/checkpoints").glob("step-*/state.json")).read_text())
    assert saved["options"]["optimizer"]["lr"] == 2e-3
    monkeypatch.setitem(rates.RATES, "fresh", (rates.Rate(math.inf, 0.5),))
    workbench.json(*options, "--steps", 3)
    rate, told, _ = rate_of_run(workbench, "auto")
    assert (rate, told) == (2e-3, "that of its checkpoints")
    code, _, err = workbench.call(*options, "--lr", 0.5)
    assert code == 2 and "--lr (was 0.002, now 0.5)" in err


def test_a_run_that_begins_from_weights_takes_the_rate_of_those_or_of_the_schedule_that_it_continues(workbench):
    options = ("distill", *SHORT, *workbench.plain)
    for kind, lora in (("pretrained", {}), ("lora", {"lora": LoraConfig(lora_rank=2)})):
        config = DistillConfig(student=str(workbench.root / "teacher"), cache=("cache",), out=Path("o"), **lora)
        rate, told = table_rate(config, student_spec(config), 300)
        assert rate == rates.rate_of(kind, 1e5).lr and told.startswith(rates.WORDS[kind]), told
    workbench.json(*options, "--student", "student.toml", "--lr", 0.002, "--steps", 3, "--out", "first")
    load = ("--student", "student.toml", "--load", "first/checkpoints/step-00000000", "--steps", 4)
    workbench.json(*options, *load, "--out", "continued")
    assert rate_of_run(workbench, "continued")[:2] == (0.002, "that of its checkpoints")
    workbench.json(*options, *load, "--override-opt-param-scheduler", "--out", "anew")
    assert rate_of_run(workbench, "anew")[0] == rates.rate_of("pretrained", 1e5).lr


def test_the_table_has_a_rate_for_every_size_which_falls_with_it_and_adapters_take_five_to_ten_times_as_much():
    for rows in rates.RATES.values():
        assert [row.parameters for row in rows] == sorted(row.parameters for row in rows)
        assert rows[-1].parameters == math.inf and [row.lr for row in rows] == sorted(row.lr for row in rows)[::-1]
    for size, times in ((1e4, 5), (1e7, 5), (3e7, 10), (6e8, 10), (8e9, 10)):
        full, adapters = (rates.rate_of(kind, size).lr for kind in ("pretrained", "lora"))
        assert adapters == pytest.approx(times * full)
    assert [rates.rate_of("fresh", size).lr for size in (1e6, 3e6, 3e7)] == [2e-3, 1e-3, 3e-4]


def test_the_page_shows_the_table_of_the_code():
    sizes = sorted({row.parameters for rows in rates.RATES.values() for row in rows})
    lines = []
    for size in sizes:
        shown = f"{size / 1e6:g} M" if size < 1e9 else f"{size / 1e9:g} B"
        found = (f"{rates.rate_of(kind, size).lr:.0e}".replace("e-0", "e-") for kind in rates.WORDS)
        lines.append(f"| {'more' if size == math.inf else f'up to {shown}'} | {' | '.join(found)} |")
    page = (ROOT / "docs" / "learning-rate.md").read_text()
    table = page[page.index("<!-- rates -->") : page.index("<!-- /rates -->")]
    assert table.splitlines()[3:] == lines


def test_a_server_and_the_options_of_a_run_that_resumes_are_refused():
    server = type(FindLrConfig(student="s", out="o", cache="c").plugins["server"])(teacher_server=("http://host/v1",))
    with pytest.raises(UsageError, match="find-lr does not use a server; make a cache with cache-teacher"):
        FindLrConfig(student="s", out="o", teacher="t", data=DataConfig(data="stdlib"), plugins={"server": server})
