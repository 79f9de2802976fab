"""What a run prints: averages, plain lines, and a log."""

import builtins
import io
import logging
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from kdtrain.errors import log
from kdtrain.monitor import progress
from kdtrain.monitor.progress import (
    Bar,
    StepText,
    Throughput,
    bar,
    formula,
    log_step,
    one_line,
    setup_logging,
    validation_line,
)


@pytest.fixture(autouse=True)
def quiet():
    """Leave the logger as it was."""
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_the_rate_counts_tokens_between_the_first_and_the_last_step_of_the_window():
    rate = Throughput(total=10, window=3)
    assert rate.add(1, 1000, 0.0) == {}
    assert rate.add(2, 100, 2.0)["tok/s"] == 50.0
    assert rate.add(3, 300, 4.0)["tok/s"] == 100.0
    last = rate.add(4, 500, 6.0)
    assert last["tok/s"] == 200.0
    assert last["eta_h"] == pytest.approx(6 * 2.0 / 3600)


STEP = {"loss": 3.58, "ce": 7.02, "kd": 3.19, "T": 1.0, "lr": 2.5e-4, "tok/s": 12_234.0, "eta_h": 9 / 3600}
HEAD = "step 1500/2000"


def test_the_line_of_a_step_is_the_loss_with_its_parts_the_rate_and_the_time_left_in_80_columns():
    parts = StepText(0.9, "forward-kl", None, learned=False).add(STEP)
    line = "step 1500/2000  loss 3.58 = .9 kl 3.19 + .1 ce 7.02  12.2k/s  0:09 left"
    assert one_line(HEAD, parts) == line and len(f"12:34 {line}") <= 80
    assert one_line(HEAD, parts, 100).split("  ")[2:] == ["lr 2.5e-04", "12.2k tok/s", "0:09 left"]
    parts = StepText(0.9, "reverse-kl", None, learned=True).add(STEP | {"T": 2.0, "kd": 3.19 / 4})
    line = one_line(HEAD, {**parts, "health": "! plateau"})
    assert line == "step 1500/2000  loss 3.58 = .9 reverse-kl 3.19 + .1 ce 7.02  T 2.00  ! plateau", (
        "the least missed go"
    )


def test_the_parts_of_a_loss_are_means_of_the_last_steps_and_add_up():
    text = StepText(0.9, "forward-kl", 0.5, learned=False)
    for number in range(60):
        kd, ce, hidden = 1.0 + number, 2.0 + number, 4.0
        parts = text.add({"loss": 0.9 * kd + 0.1 * ce + 0.5 * hidden, "kd": kd, "ce": ce, "hidden": hidden, "T": 1.0})
    assert parts == {"loss": "loss 37.60 = .9 kl 35.50 + .1 ce 36.50 + .5 hidden 4.00"}
    for alpha, loss, line in ((0.9, 6.8, "loss 6.80"), (0.0, 1e9, "loss 1,000,000,000")):  # cross-entropy alone: no sum
        assert StepText(alpha, "forward-kl", None, learned=False).add({"loss": loss}) == {"loss": line}
    assert formula(0.9, "forward-kl", None) == ".9 kl + .1 ce" and formula(0.0, "jsd:0.5", None) == "ce"
    assert formula(1.0, "jsd", 2.0) == "jsd + 2 hidden" and formula("auto", "tvd", None) == "alpha tvd + (1 - alpha) ce"
    assert formula(0.9, "forward-kl", None, True, 0.5) == ".9 kl + .1 ce + .9 ce of replay + .5 router"


def test_the_line_of_a_validation_has_the_change_the_teacher_and_whether_it_is_best():
    numbers = {"validation/loss": 6.838, "validation/teacher_loss": 4.4271, "validation/kl": 2.4}
    assert validation_line(80, numbers, 7.403, True) == "val @80 6.838 (-0.565) teacher 4.427 best"
    assert validation_line(0, {"validation/loss": 1.5e300}, None, False) == "val @0 1.5e+300"


def test_on_a_terminal_the_bar_shows_a_step_without_colours_and_only_the_file_has_its_line(tmp_path, monkeypatch):
    screen = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    monkeypatch.setattr(progress, "console", screen)
    setup_logging(tmp_path / "train.log")
    log.info("val @80 = .9 kl, 'runs/a'")
    log_step("step 1/2")
    assert screen.file.getvalue().strip() == "val @80 = .9 kl, 'runs/a'"
    logged = [line.split(" ", 2)[-1] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert logged == ["val @80 = .9 kl, 'runs/a'", "step 1/2"]


def test_in_a_notebook_a_bar_is_one_line_that_changes_and_logs_are_not_red(tmp_path, monkeypatch, capsys):
    shown = []

    def publish(data, transient, update):
        shown.append((data["text/plain"], transient["display_id"], update))

    shell = SimpleNamespace(display_pub=SimpleNamespace(publish=publish))
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(progress, "console", Console(width=80, force_jupyter=True))
    setup_logging()
    log.info("val @80")
    with bar("distill", 4) as drawn:
        drawn.logged = -1.0
        drawn.update(2, "12.2k tok/s", more="loss 3.58")
        drawn.update(4, "12.2k tok/s", more="loss 3.50")
    captured = capsys.readouterr()
    assert "val @80" in captured.out and captured.err == ""
    assert shown[-1][0] == "distill ████████████████ 4/4 | 12.2k tok/s\nloss 3.50"
    assert len({place for _, place, _ in shown}) == 1 and [update for *_, update in shown][1:] == [True]


def test_lines_go_to_stderr_and_to_the_end_of_the_file(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text("before\n")
    setup_logging(path)
    log.info("once")
    setup_logging(path)
    log.warning("twice")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [text.split(" ", 1)[-1] for text in captured.err.splitlines()] == ["once", "twice"]
    assert all(re.match(r"\d\d:\d\d ", text) for text in captured.err.splitlines())
    assert [text.split(" ", 2)[-1] for text in path.read_text().splitlines()] == ["before", "once", "twice"]


@pytest.mark.parametrize("width", [60, 80, 300])
def test_a_bar_has_two_lines_that_fit_the_terminal(width):
    shown = Bar("distill", 2000, done=100)
    shown.update(250, "12.2k tok/s | 12:31 left", more="loss 3.58 = .9 kl 3.19 + .1 ce 7.02 | T 1.31 | lr 2.5e-04")
    screen = Console(width=width, file=io.StringIO())
    screen.print(shown.bar.get_renderable())
    first, second = screen.file.getvalue().splitlines()
    assert first.startswith("distill ") and "12 % 250/2000" in " ".join(first.split()) and "12.2k" in first
    assert second.startswith("loss 3.58 = .9 kl 3.19") and max(len(first), len(second)) <= width
    assert ("12:31 left" in first) == (width > 60)


def test_without_a_terminal_a_bar_is_a_plain_line_now_and_then(monkeypatch, caplog):
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    log.propagate = True
    caplog.set_level(logging.INFO, "kdtrain")
    with bar("cache", 20, unit="sequences") as shown:
        shown.every = 5.0
        for done in range(1, 13):
            shown.update(done)
    log.propagate = False
    assert 1 <= len(caplog.messages) < 12
    assert all(text.startswith("cache ") and "/20 " in text and "sequences/s" in text for text in caplog.messages)


def test_a_rate_counts_only_the_work_of_this_process(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = Bar("distill", 200, done=100, unit="steps")
    shown.done = 120
    assert shown.rate() == "2 steps/s | 0:40 left"
