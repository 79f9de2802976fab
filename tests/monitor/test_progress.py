"""What a run prints: averages, plain lines, and a log."""

import io
import logging

import pytest
from rich.console import Console

from kdtrain.monitor import progress
from kdtrain.monitor.progress import STATUS, Bar, Rate, bar, line, log, setup_logging, status


@pytest.fixture(autouse=True)
def quiet():
    """Leave the logger as it was."""
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_the_rate_counts_tokens_between_the_first_and_the_last_step_of_the_window():
    rate = Rate(total=10, window=3)
    assert rate.add(1, 1000, 0.0) == {}
    assert rate.add(2, 100, 2.0)["tok/s"] == 50.0
    assert rate.add(3, 300, 4.0)["tok/s"] == 100.0
    last = rate.add(4, 500, 6.0)
    assert last["tok/s"] == 200.0
    assert last["eta_h"] == pytest.approx(6 * 2.0 / 3600)


def test_numbers_are_rounded_for_reading_by_their_kind():
    numbers = {"loss": 1.23456, "T": 2.0, "lr": 3e-4, "tok/s": 12345.6, "grad_norm": 0.98765}
    assert line(numbers) == "loss=1.2346 T=2.000 lr=3.00e-04 tok/s=12,346 grad_norm=0.988"


def test_a_number_of_hundreds_of_digits_is_written_in_powers_of_ten():
    assert line({"validation/perplexity": 1.5e300, "validation/loss": 691.2}) == (
        "validation/perplexity=1.5e+300 validation/loss=691.2000"
    )


def test_the_line_of_a_step_has_all_names_in_order_and_leaves_out_missing_ones():
    numbers = {"mode": "bf16", "loss": 1.0, "tokens": 5.0, "ckpt": -150, "memory_mb": 1234.5, "mem_delta": -3.2}
    assert status(numbers) == "loss=1.0000 ckpt=-150 memory_mb=1,234 mem_delta=-3 mode=bf16"
    full = dict.fromkeys(STATUS, 1.0) | {"ckpt": 0, "mode": "fp32"}
    assert [text.split("=")[0] for text in status(full).split()] == [
        *("loss", "loss_avg", "kd_T1", "hidden", "T", "dL/dlogT", "lr", "grad_norm", "tok/s", "eta_h"),
        *("ckpt", "memory_mb", "mem_delta", "mode"),
    ]


def test_lines_go_to_stderr_and_to_the_end_of_the_file(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text("before\n")
    setup_logging(path)
    log.info("once")
    setup_logging(path)
    log.warning("twice")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [text.split(" ", 2)[-1] for text in captured.err.splitlines()] == ["once", "twice"]
    assert [text.split(" ", 2)[-1] for text in path.read_text().splitlines()] == ["before", "once", "twice"]


@pytest.mark.parametrize("width", [60, 80, 300])
def test_on_a_narrow_terminal_the_numbers_of_a_step_are_cut_and_the_bar_is_not(width):
    text = status(dict.fromkeys(STATUS, 1.0) | {"ckpt": 0, "mode": "fp32"})
    shown = Bar("distil", 2000, done=100)
    shown.update(250, text)
    screen = Console(width=width, file=io.StringIO())
    screen.print(shown.bar.get_renderable())
    [drawn] = screen.file.getvalue().splitlines()
    assert drawn.startswith("distil ") and "250/2000" in drawn and "--:--" in drawn and "loss=1" in drawn
    assert len(drawn) <= width
    assert ("mode=fp32" in drawn) == (width == 300)


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
    assert all(text.startswith("cache ") and "/20 " in text and "sequences/s=" in text for text in caplog.messages)


def test_a_rate_counts_only_the_work_of_this_process(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = Bar("distill", 200, done=100, unit="steps")
    shown.done = 120
    assert shown.rate() == "steps/s=2.0 eta_min=0.7"
