"""`compare` and `plot`: what they show of runs, of anyone's, and what they refuse in one line."""

import csv
import io
import json
import re
import statistics
import sys
from pathlib import Path

import matplotlib
import pytest

import kdtrain as kd
from kdtrain.files import publish_json
from kdtrain.plugins.papers import figures
from kdtrain.plugins.papers.groups import read_groups
from tests.logged_runs import write_lines, write_run, write_three


@pytest.fixture
def folders(tmp_path):
    return write_three(tmp_path)


def test_compare_shows_what_differs_and_marks_what_seeds_do_not_explain(workbench, folders):
    code, out, err = workbench.call("compare", *folders)
    assert (code, err) == (0, "")
    row = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert row["--alpha"].split() == ["auto", "0.5"] and "--seed" not in out
    assert row["last validation: loss, nats"].split("  ")[0] == "2.0050 ± 0.0071" and not set("│─━┃") & set(out)
    assert "by best validation loss, nats: b is worse than a0 (+0.8950, of too few seeds)" in out
    assert "+0.8950" in out and "fewer seeds than the 2 of the others: b 1" in out
    numbers = workbench.json("compare", *folders)["groups"][1]["numbers"]
    assert numbers["last_validation_loss"]["beyond_seeds"] is None, "one seed of the other has no interval"


def test_compare_of_one_seed_says_so_and_marks_nothing(workbench, folders):
    code, out, _ = workbench.call("compare", *folders[1:])
    assert code == 0 and "one seed only" in out and " *" not in out


EVALUATION = {
    "step": 40,
    "checkpoint": "step-00000040",
    "split": "test",
    "cache": "cd" * 32,
    "sequences": 8,
    "ece": 0.0125,
}


@pytest.fixture
def arms(tmp_path):
    """Write three seeds of two arms, and two of a third one, each with a test loss; a strange name is among them."""
    found = []
    for arm, alpha, seeds in (("kd", 0.9, 3), ("c_e & 50%", 0.0, 3), ("few", 0.5, 2)):
        for seed in range(seeds):
            folder = write_run(tmp_path / "s" / arm / f"seed-{seed}", 2 + alpha / 10 + seed / 100, seed, alpha=alpha)
            losses = {"loss": 3 - alpha + seed / 100, "kl": 1.5}
            write_lines(folder / "evaluations.jsonl", [EVALUATION | {"loss": 99.0}, EVALUATION | losses])
            found.append(folder)
    return found


def test_test_numbers_are_those_of_the_last_evaluation_and_differences_are_of_pairs_of_one_seed(workbench, arms):
    code, out, err = workbench.call("compare", *arms)
    assert (code, err) == (0, "") and re.search(r"\ntest: loss, nats +2.1100 ± 0.0100 ", out), out
    worse = "c_e & 50% is worse than kd (+0.9000 ± 0.0000), few is worse than kd (+0.4000 ± 0.0000)"
    assert f"by test loss, nats: {worse}" in out
    assert "fewer seeds than the 3 of the others: few 2" in out and "corrected for 2 comparisons (Bonferroni)" in out
    assert "test: 8 sequences of the test split of the cache cdcdcdcdcdcd; of each student step-00000040" in out
    numbers = {each["name"]: each["numbers"] for each in workbench.json("compare", *arms)["groups"]}
    # every pair differs by 0.9, whatever the seed: an interval of (nearly) nothing, which the spread over seeds is not
    other = numbers["c_e & 50%"]["test_loss"]
    assert other["difference"] == pytest.approx(0.9) and other["high"] - other["low"] < 1e-9 and other["beyond_seeds"]


def test_a_table_for_a_paper_has_a_row_an_arm_escaped_and_the_best_in_bold_where_seeds_do_not_explain_it(
    workbench, arms
):
    _, out, _ = workbench.call("compare", *arms, "--format", "latex")
    lines = out.splitlines()
    assert lines[:2] == [r"{\footnotesize\noindent\begin{tabular}{@{}lrrr@{}}", r"\toprule"] and "%" not in {*out} - {
        *r"\%"
    }
    rows = [line for line in lines if line.endswith(r"\\")]
    assert {line.count(" & ") for line in rows} == {3} and out.count("{") == out.count("}")
    heads = [" ".join(cell).split() for cell in zip(*(row.rstrip("\\").split(" & ") for row in rows[:-3]), strict=True)]
    down = r"nats $\downarrow$"
    units = ["", f"loss, {down}", f"KL to the teacher, {down}", r"ECE (15 bins), \% $\downarrow$"]
    assert [" ".join(head) for head in heads] == units and lines[lines.index(rows[-3]) - 1] == r"\midrule"
    assert [line.split(" & ")[0] for line in rows[-3:]] == ["kd", r"c\_e \& 50\%", "few"]
    assert r"\textbf{2.1100 $\pm$ 0.0100}" in rows[-3] and "textbf" not in rows[-2] + rows[-1]
    assert r" & 1.25 $\pm$ 0.00 \\" in rows[-3], "what is equal has no best"
    below = "\n".join(lines[lines.index(r"\bottomrule") :])
    assert r"mean $\pm$ standard deviation over seeds 0, 1, 2\par" in below and "of the test split of" in below

    _, out, _ = workbench.call("compare", *arms, "--format", "markdown")
    assert "| kd | **2.1100 ± 0.0100** |" in out and "corrected for 2 comparisons" in out


def test_csv_and_the_library_hold_the_same_numbers(workbench, arms):
    _, out, _ = workbench.call("compare", *arms, "--format", "csv")
    rows, runs = list(csv.DictReader(io.StringIO(out))), kd.runs(arms)
    assert [row["name"] for row in rows] == ["kd", "c_e & 50%", "few"] and len(runs) == len(arms)
    for row in rows:
        own = [run for run in runs if f"/{row['name']}/" in run["run"]]
        for name in ("best_validation_loss", "test_loss", "test_ece"):
            values = [run[name] for run in own]
            assert float(row[f"{name}_mean"]) == statistics.fmean(values) and int(row[f"{name}_seeds"]) == len(own)
            assert float(row[f"{name}_deviation"]) == statistics.stdev(values)
    code, _, err = workbench.call("compare", *arms, "--format", "csv", "--json")
    assert code == 2 and "--json and --format csv exclude each other" in err


@pytest.fixture
def sweep(tmp_path):
    """Write a finished sweep of three arms, tested beside a teacher; the first arm in its file is the last by name."""
    names = [f"{arm}/seed-{seed}" for seed in (1, 0) for arm in ("cross-entropy", "b", "*a")]
    for name in names:
        arm, seed = name.split("/")[0], int(name[-1])
        folder = write_run(tmp_path / "paper" / name, 2.0, seed, alpha={"cross-entropy": 0, "b": 0.5, "*a": 0.75}[arm])
        loss = {"cross-entropy": 5.0, "b": 4.0, "*a": 4.5}[arm] + seed / 10
        found = EVALUATION | {
            "data": "stdlib",
            "teacher": "t",
            "cache": None,
            "loss": loss,
            "teacher_loss": 1.0 + 2 / 3,
        }
        write_lines(folder / "evaluations.jsonl", [found | {"kl": loss - 2 / 3, "agreement": 0.123456}])
    publish_json(tmp_path / "paper/sweep.json", {each: ["distill"] for each in ("caches/c", *names, "d/seed-0")}, "s")
    return tmp_path / "paper"


def test_the_folder_of_a_sweep_stands_for_its_runs_in_the_order_of_the_file_by_the_names_of_its_arms(workbench, sweep):
    found = workbench.json("compare", sweep)["groups"]
    assert [each["name"] for each in found] == ["cross-entropy", "b", "*a"]
    assert [[run["seed"] for run in each["runs"]] for each in found] == [[1, 0]] * 3
    assert workbench.json("compare", sweep / "b/seed-0", sweep / "*a/seed-0")["groups"][0]["name"] == "b"
    for runs in (kd.runs([sweep]), kd.runs(sweep), kd.runs(f"{sweep}/*/seed-*")):
        assert len(runs) == 6 and {(each["arm"], each["seed"]) for each in runs} >= {("cross-entropy", 0), ("b", 1)}
    (sweep / "sweep.json").write_text("{}")
    code, _, err = workbench.call("compare", sweep)
    assert code == 2 and "paper is not a run" in err
    assert kd.runs(f"{sweep}/b/*")[0]["arm"] == "b"


def test_a_paper_has_the_columns_digits_and_way_round_that_are_asked_for(workbench, sweep):
    words = ("compare", sweep, "--format", "markdown", "--columns", "test_agreement,test_loss,tokens", "--digits", "3")
    _, out, _ = workbench.call(*words)
    assert out.splitlines()[0] == "| | agreement with the teacher, % ↑ | loss, nats ↓ | tokens |"
    assert out.splitlines()[2:4] == [
        "| cross-entropy | 12.3 ± 0.0 | 5.050 ± 0.071 | 4.0k |",
        "| b | 12.3 ± 0.0 | **4.050 ± 0.071** | 4.0k |",
    ]
    _, out, _ = workbench.call(*words, "--transpose")
    assert out.splitlines()[0] == "| | cross-entropy | b | *a | teacher |"
    assert "| loss, nats ↓ | 5.050 ± 0.071 | **4.050 ± 0.071** | 4.550 ± 0.071 | 1.667 |" in out.splitlines()
    _, out, _ = workbench.call("compare", sweep, "--columns", "parameters,alpha_mean,test_loss", "--digits", "2")
    assert (
        re.search("\nparameters +1.05 M", out) and re.search(r"test: loss, nats +5.05 ± 0.07 ", out) and "KL" not in out
    )
    _, out, _ = workbench.call("compare", sweep, "--columns", "test_loss", "--transpose")
    assert re.search(r"\nb +.* 4.0500 ± 0.0707\n", out)
    assert [*workbench.json("compare", sweep, "--columns", "test_kl")["groups"][0]["numbers"]] == ["test_kl"]


def test_a_paper_has_the_teachers_row_and_the_share_of_the_gap_that_each_arm_closes(workbench, sweep):
    _, out, _ = workbench.call("compare", sweep, "--format", "markdown", "--columns", "test_loss,test_gap_closed")
    *_, first, b, _, teacher = out.partition("\n\n")[0].splitlines()
    assert teacher == "| teacher | 1.6667 |  |" and first.endswith("| 0.00 ± 0.00 |")
    # by seed: 1.0 of 5.0 - 1.6667 and of 5.1 - 1.6667
    assert b.endswith(f"**{100 * (1 / (10 / 3) + 1 / (10 / 3 + 0.1)) / 2:.2f} ± 0.62** |")
    gap = "test_gap_closed"
    assert [each[gap] for each in kd.runs([sweep])][1] == pytest.approx(1 / (10 / 3 + 0.1))
    for folder in sweep.glob("b/*"):  # a test on another text
        write_lines(folder / "evaluations.jsonl", [EVALUATION | {"loss": 4.0, "teacher_loss": 1.0}])
    first, b, a = workbench.json("compare", sweep)["groups"]
    assert b["numbers"][gap]["mean"] is None and a["numbers"][gap]["mean"] > 0.1
    _, out, _ = workbench.call("compare", sweep, "--format", "markdown")
    assert "teacher |" not in out, "of two texts it has two losses"


def width(text):
    """Return the points of a cell in 8 pt Computer Modern, by the widths of its letters at 10 pt.

    At 8 pt it is 6 % wider.
    """
    metrics = Path(matplotlib.get_data_path(), "fonts/afm/cmr10.afm").read_text()
    known = {int(code): float(wide) for code, wide in re.findall(r"^C (\d+) ; WX ([\d.]+)", metrics, re.MULTILINE)}
    bold = 1.15 if "textbf" in text else 1.0
    plain = re.sub(r"\$\\\w+\$", "M", re.sub(r"\\textbf|\\(?=[%&_])|[{}]", "", text))
    return bold * sum(333.3 if each == " " else known[ord(each)] for each in plain) * 8 / 1000 * 1.0625


def test_two_numbers_over_seeds_fit_a_column_of_a_paper_and_a_caption_makes_a_table_of_them(workbench, sweep):
    words = ("compare", sweep, "--format", "latex", "--columns", "test_loss,test_kl")
    _, out, _ = workbench.call(*words, "--caption", r"The $\alpha$ & 5\%", "--label", "tab:a")
    lines = out.splitlines()
    assert (
        lines[0] == r"\begin{table}\centering\caption{The $\alpha$ & 5\%}\label{tab:a}" and lines[-1] == r"\end{table}"
    )
    rows = [line.removesuffix(r" \\").split(" & ") for line in lines if line.endswith(r"\\")]
    columns = [max(map(width, column)) for column in zip(*rows, strict=True)]
    assert all(55 < each < 75 for each in columns[1:]) and len(columns) == 3
    assert sum(columns) + 2 * 2 * 6 <= 219, (
        "points: a column of ACL, the narrowest of the usual ones; 6 beside each cell"
    )


def test_a_name_is_neither_an_argument_in_latex_nor_a_formula_in_a_spreadsheet(workbench, sweep, tmp_path):
    _, out, _ = workbench.call("compare", sweep, "--format", "latex")
    assert "\n{*}a & " in out
    strange = write_run(tmp_path / "[1cm] x", 2.0, alpha=0.25)
    formulas = [
        write_run(tmp_path / name, 2.0, alpha=alpha) for name, alpha in (("=1+1", 0.1), ("-2", 0.2), ("@x", 0.4))
    ]
    _, out, _ = workbench.call("compare", strange, *formulas, "--format", "latex")
    assert "\n{[}1cm] x & " in out and "\\\\\n[" not in out
    _, out, _ = workbench.call("compare", *formulas, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [each["name"] for each in rows] == ["'=1+1", "'-2", "'@x"] and [each["alpha"] for each in rows] == [
        "0.1",
        "0.2",
        "0.4",
    ]


def test_no_column_of_numbers_in_csv_has_another_sign_for_none(workbench, tmp_path):
    epochs = {"epochs": 123_456}
    runs = [write_run(tmp_path / f"{alpha}", 2.0, alpha=alpha, **epochs) for alpha in (0.123456, 1e-5)]
    runs.append(write_run(tmp_path / "none", 2.0, alpha=0))
    _, out, _ = workbench.call("compare", *runs, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["epochs"], row["alpha"]) for row in rows] == [("123456", "0.123456"), ("123456", "1e-05"), ("", "0")]
    _, out, _ = workbench.call("compare", *runs, "--format", "csv", "--columns", "test_loss,tokens")
    header, *rows = csv.reader(io.StringIO(out))
    assert header[-2:] == ["test_loss_beyond_seeds", "tokens_mean"] and not {"-"} & {
        each for row in rows for each in row
    }


def test_copies_of_one_seed_are_one_seed_below_a_paper(workbench, tmp_path):
    runs = [write_run(tmp_path / str(copy), 2.0) for copy in range(3)]
    _, out, _ = workbench.call("compare", *runs, "--format", "markdown")
    assert "\nseed 0\none seed only" in out


TOP_K = "8 entries and a bucket, a lower bound"


@pytest.mark.parametrize(
    "caches, estimators, compares",
    [
        ("cd", ("24 samples", TOP_K), False),
        ("cd", (None, None), False),
        ("cd", (TOP_K, TOP_K), True),
        ("cc", (None, None), True),
        ("cc", ("24 samples", "24 samples"), True),
    ],
)
def test_validation_kl_is_compared_within_one_codec_and_test_kl_on_one_cache(
    workbench, tmp_path, monkeypatch, caches, estimators, compares
):
    monkeypatch.setenv("COLUMNS", "200")
    folders = []
    for arm, cache, estimator in zip("ab", caches, estimators, strict=True):
        for seed in range(3):
            folder = write_run(tmp_path / arm / f"seed-{seed}", 2.0, seed, tail="ghost" if arm == "a" else "drop")
            environment = json.loads((folder / "environment.json").read_text())
            environment |= {"cache": 32 * f"{cache}0"} | ({"kl_estimator": estimator} if estimator else {})
            (folder / "environment.json").write_text(json.dumps(environment))
            kl = 1.0 + (arm == "b") + seed / 100
            write_lines(folder / "metrics.jsonl", [{"step": 41, "validation/loss": 2.0, "validation/kl": kl}])
            write_lines(folder / "evaluations.jsonl", [EVALUATION | {"kl": kl, "loss": kl}])
            folders.append(folder)
    _, text, _ = workbench.call("compare", *folders)
    row = text[text.index("last validation: KL") :].partition("\ntest: ")[0].partition("\nlast validation: next")[0]
    assert (" *" in row) == compares and all(each is None or f"from {each}" in row for each in estimators)
    unequal = "Different caches: validation KL is not comparable here; use test KL."
    assert (unequal in text) == (not compares)
    assert ("validation losses compare only over the same text" in text) == (caches == "cd")
    other = workbench.json("compare", *folders)["groups"][1]
    assert other["kl_estimator"] == estimators[1] and other["numbers"]["test_kl"]["beyond_seeds"]
    assert (
        (other["numbers"]["kl"]["difference"] is not None) == bool(other["numbers"]["kl"]["beyond_seeds"]) == compares
    )
    _, table, _ = workbench.call("compare", *folders, "--format", "csv")
    _, second = csv.DictReader(io.StringIO(table))
    assert (second["kl_beyond_seeds"] == "True") == compares and second["kl_estimator"] == (estimators[1] or "")
    assert [each["kl_estimator"] for each in kd.runs(folders)] == [each for each in estimators for _ in range(3)]

    for folder in folders[3:]:
        write_lines(folder / "evaluations.jsonl", [EVALUATION | {"cache": "ef" * 32, "kl": 9.0, "loss": 9.0}])
    numbers = workbench.json("compare", *folders)["groups"][1]["numbers"]
    assert numbers["test_kl"]["beyond_seeds"] is numbers["test_loss"]["difference"] is None


@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_writes_the_same_bytes_again_and_never_over_a_file_unasked(workbench, folders, tmp_path, ending, begins):
    words = (
        "plot",
        *folders,
        "--out",
        tmp_path / f"f.{ending}",
        "--x",
        "minutes",
        "--y",
        "validation/loss,temperature",
    )
    assert workbench.json(*words)["curves"] == ["a0: 2 runs, seeds 0, 1", "b: seed 0"]
    first = (tmp_path / f"f.{ending}").read_bytes()
    code, _, err = workbench.call(*words)
    assert code == 2 and "add --overwrite" in err
    workbench.json(*words, "--overwrite")
    assert first.startswith(begins) and (tmp_path / f"f.{ending}").read_bytes() == first


def test_a_plot_has_units_distinct_looks_interventions_and_precision(folders):
    groups = read_groups(folders)
    figure = figures.draw(groups, "tokens", ["validation/loss", "temperature"])
    loss, temperature = figure.axes
    assert (loss.get_ylabel(), temperature.get_xlabel()) == ("nats per token", "tokens")
    labels = [each.get_text() for each in figure.legends[0].get_texts()]
    assert labels == ["a0 (2 seeds)", "b", "rollback", "switch", "resume", "quantised (foot)"]
    marks = {line.get_marker(): line.get_xdata()[0] for line in temperature.get_lines() if len(line.get_xdata()) == 1}
    assert (marks["v"], marks["D"], marks[">"]) == (2000, 3000, 1000)
    bars = [list(line.get_xdata()) for line in loss.get_lines() if line.get_linewidth() == 3]
    assert bars == [[0, 1000]] * 3
    looks = figures.looks(groups * 4)
    assert len({each[0] for each in looks}) == len({each[1] for each in looks}) == 8
    assert figure.get_size_inches()[0] == 3.5


def test_a_name_is_no_formula_and_a_long_curve_is_thinned():
    assert (
        figures.literal("a$x$") == r"a\$x\$" and figures.literal("_b") == " _b" and len(figures.literal("x" * 99)) == 48
    )
    points = [(step, 2.0 * step) for step in range(10_001)]
    thin = figures.thinned(points)
    assert len(thin) <= figures.MOST_POINTS and thin[-1][0] == 10_000 and figures.thinned(points[:9]) == points[:9]


def test_numbers_that_no_run_writes_leave_the_curves_of_the_others(workbench, tmp_path, folders):
    odd = write_run(tmp_path / "odd", seed=9)
    write_lines(odd / "metrics.jsonl", [{"step": 41, "loss": 1e308, "tokens": 1e308, "tok/s_last": 1e-300}])
    write_lines(odd / "metrics.jsonl", [{"step": step, "loss": 2.0, "tokens": None} for step in (42, 43)])
    places = read_groups([odd])[0].runs[0].record.places("tokens")
    assert places[40] == 4000 and max(places.values()) == 4000 and 43 in places
    for axis in ("steps", "tokens", "minutes"):
        workbench.json("plot", odd, "--out", tmp_path / f"{axis}.png", "--y", "loss,quantized", "--x", axis)


def test_a_quantised_stretch_is_drawn_at_its_own_steps_where_others_are_missing(tmp_path):
    run = write_run(tmp_path / "run")  # quantised up to step 10
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [each for each in logged if not 3 <= each["step"] <= 6]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))
    write_lines(run / "metrics.jsonl", [{"step": step, "loss": 2.0, "quantized": 1.0} for step in (60, 61)])
    (group,) = read_groups([run])
    axes = figures.draw([group], "steps", ["loss"]).axes[0]
    bars = [[float(x) for x in line.get_xdata()] for line in axes.get_lines() if line.get_linewidth() == 3]
    assert bars == [[0, 10], [60, 61]]


@pytest.mark.parametrize(
    "words, says",
    [
        (("compare",), "no run to compare"),
        (("compare", "nowhere"), "nowhere: it does not exist"),
        (("compare", "text.txt"), "text.txt is a file; name the folder of a run"),
        (("compare", "cache"), "cache is not a run"),
        (("compare", "{run}", "--columns", "los"), "--columns los is none of best_validation_loss, bits_per_byte"),
        (("compare", "{run}", "--digits", "3", "--json"), "--digits and --transpose are for tables"),
        (("compare", "{run}", "--transpose", "--format", "csv"), "--digits and --transpose are for tables"),
        (("compare", "{run}", "--caption", "c"), "--caption is for --format latex"),
        (("compare", "{run}", "--format", "latex", "--label", "l"), "--label has no effect without --caption"),
        (("plot", "{run}", "--out", "f.gif"), "ends in none of .png, .svg and .pdf"),
        (("plot", "{run}", "--out", "f.png", "--y", "validation/los"), "perhaps you meant 'validation/loss'"),
        (("plot", "{run}", "--out", "none/f.png"), "the folder none does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(workbench, folders, words, says):
    code, _, err = workbench.call(*(word.format(run=folders[0]) for word in words))
    assert code == 2 and says in err and err.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(workbench, folders, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = workbench.call("plot", folders[0], "--out", tmp_path / "f.png")
    assert code == 2 and "pip install 'kdtrain[plot]'" in err


def test_calibration_over_seeds_is_weighted_by_tokens():
    one = [{"tokens": 1.0, "confidence": 0.0, "accuracy": 1.0}]
    three = [{"tokens": 3.0, "confidence": 0.4, "accuracy": 0.0}]
    assert figures.pooled([one, three]) == [{"tokens": 4.0, "confidence": pytest.approx(0.3), "accuracy": 0.25}]
    empty = [{"tokens": 0.0, "confidence": 0.0, "accuracy": 0.0}]
    assert figures.pooled([empty, empty]) == empty
