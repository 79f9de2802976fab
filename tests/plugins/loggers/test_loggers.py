"""TensorBoard and W&B: what each shows of a run, also after a rollback and a resume, and what they refuse."""

import json
import sys

import pytest
import torch

from kdtrain.config.sections import MonitorConfig
from kdtrain.errors import RunError, UsageError
from kdtrain.monitor.writers import Writers
from kdtrain.plugins.loggers import TensorBoard, WeightsAndBiases
from tests.logged_runs import wandb_history, wandb_records

BOARD = MonitorConfig()
WANDB = MonitorConfig(log_to="wandb:p")


def lines_of(folder, name="metrics.jsonl"):
    return [json.loads(text) for text in (folder / name).read_text().splitlines()]


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def steps_in(folder, tag):
    return [event.step for event in events_of(folder).Scalars(tag)]


def texts(folder, tag):
    tensors = events_of(folder).Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in tensors]


def test_tensorboard_shows_numbers_histograms_samples_and_options(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    module = torch.nn.Linear(3, 2)
    module.weight.grad = torch.full((2, 3), 0.5)
    writers = Writers(tmp_path, 0, None, BOARD)
    options = {"seed": 3, "out": "r", "epochs": None, "betas": [0.9, 0.95]}
    writers.hyperparameters({"run": options, "optimizer": {"lr": 0.5}})
    for step in (1, 2):
        writers.metrics(step, {"loss": step / 2, "tok/s": 5.0, "dL/dlogT": 0.5, "validation/kl": 0.25})
    writers.samples(5, [{"prompt": "a|b\nc", "greedy": "d"}])
    writers.samples(6, [])
    writers.histograms(7, distributions(module))
    writers.close()
    events = events_of(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["train/dL_per_dlogT", "train/loss", "train/tok_per_s", "validation/kl"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
    assert sorted(events.Tags()["histograms"]) == ["gradients/weight", "parameters/bias", "parameters/weight"]
    [shown] = events.Histograms("gradients/weight")
    value = shown.histogram_value
    assert (shown.step, value.num, value.min, value.max, value.sum) == (7, 6, 0.5, 0.5, 3.0) and sum(value.bucket) == 6
    assert lines_of(tmp_path, "samples.jsonl") == [{"step": 5, "prompt": "a|b\nc", "greedy": "d"}]
    assert texts(tmp_path, "samples") == [(5, "| prompt | greedy |\n| --- | --- |\n| a\\|b<br>c | d |")]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    found = {name: value.number_value or value.string_value for name, value in start.hparams.items()}
    assert found == {"run/seed": 3, "run/out": "r", "run/betas": "[0.9, 0.95]", "optimizer/lr": 0.5}


def test_steps_after_a_rollback_are_removed_from_files_and_tensorboard_and_events_stay(tmp_path):
    writers = Writers(tmp_path, 0, None, BOARD)
    for step in range(1, 7):
        writers.metrics(step, {"loss": float(step)})
        writers.samples(step, [{"prompt": "a", "greedy": str(step)}])
    writers.metrics(4, {"validation/loss": 1.0})
    writers.event("spike", 6)
    writers.rewind(3)
    writers.event("rollback", 3, spike=6)
    for step in (4, 5):
        writers.metrics(step, {"loss": 10.0 * step})
    writers.close()
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]
    assert [line["step"] for line in lines_of(tmp_path, "samples.jsonl")] == [1, 2, 3]
    assert [line["event"] for line in lines_of(tmp_path, "events.jsonl")] == ["spike", "rollback"]
    board = events_of(tmp_path).Scalars("train/loss")
    assert [(event.step, event.value) for event in board] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]
    assert texts(tmp_path, "events") == [(6, "spike"), (3, "rollback spike: 6")]


@pytest.mark.parametrize("resumed", [0, 3])
def test_tensorboard_shows_each_step_once_after_a_resume_and_after_a_new_start(tmp_path, monkeypatch, resumed):
    from tensorboard.summary.writer import event_file_writer

    counter = event_file_writer.AtomicCounter(9)  # by name, file 10 comes before file 9 of the same second
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    for first, last in ((1, 6), (resumed + 1, 5)):
        writers = Writers(tmp_path, first - 1, None, BOARD)
        for step in range(first, last):
            writers.metrics(step, {"loss": float(step)})
        writers.close()
    assert steps_in(tmp_path, "train/loss") == [1, 2, 3, 4]


def distributions(module):
    """Return what a run logs of a module."""
    named = dict(module.named_parameters())
    gradients = {f"gradients/{name}": each.grad for name, each in named.items() if each.grad is not None}
    return {f"parameters/{name}": each for name, each in named.items()} | gradients


@pytest.fixture(scope="module")
def wandb():
    """Import the package itself, offline; its process ends with these tests."""
    wandb = pytest.importorskip("wandb")
    yield wandb
    wandb.teardown()


def test_wandb_gets_numbers_histograms_texts_events_and_options_by_our_step(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_NAME", "n")
    writers = Writers(tmp_path, 0, None, WANDB)
    writers.hyperparameters({"optimizer": {"lr": 0.5}})
    writers.metrics(4, {"loss": 1.0, "validation/kl": 2.0})
    writers.samples(4, [{"prompt": "a", "greedy": "b"}])
    writers.event("stop", 4, signal="SIGTERM")
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 0.75)
    writers.histograms(4, distributions(module))
    writers.rewind(2)
    writers.metrics(3, {"loss": 0.5})
    writers.close()
    [records] = wandb_records(tmp_path, ended=True)
    run = next(each.run for each in records if each.HasField("run"))
    assert (run.project, run.display_name) == ("p", "n")
    options = [update for each in records if each.HasField("config") for update in each.config.update]
    assert ("optimizer/lr", "0.5") in [(".".join(each.nested_key) or each.key, each.value_json) for each in options]
    metrics = [each.metric for each in records if each.HasField("metric")]
    assert ("*", "step") in [(each.glob_name, each.step_metric) for each in metrics]
    numbers, table, event, drawn, *again = wandb_history(records)
    assert (numbers["step"], numbers["train/loss"], numbers["validation/kl"]) == (4, 1.0, 2.0)
    assert (table["samples.nrows"], table["samples.ncols"]) == (1, 2)
    assert event["events/stop"] == 1 and drawn["parameters/weight.values"] == [1]
    assert [(each["step"], each.get("train/loss")) for each in again] == [(2, None), (3, 0.5)]


@pytest.mark.parametrize("own", [False, True])
def test_a_run_of_a_sweep_has_its_name_group_and_tags_in_wandb_unless_the_user_names_them(
    tmp_path, wandb, monkeypatch, own
):
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.setenv(name, "mine") if own else monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # it reads the environment when it starts
    folder = tmp_path / "paper/kd/seed-1"
    folder.mkdir(parents=True)
    (tmp_path / "paper/sweep.json").write_text("{}")
    for path in (folder, tmp_path):
        Writers(path, 0, None, WANDB).close()
    found = []
    for path in (folder, tmp_path):
        [records] = wandb_records(path, ended=True)
        run = next(each.run for each in records if each.HasField("run"))
        found.append((run.display_name, run.run_group, [*run.tags]))
    if own:
        assert found == [("mine", "mine", ["mine"])] * 2
    else:
        assert found == [("kd/seed-1", "paper/kd", ["paper", "kd"]), (tmp_path.name, "", [])]


def test_a_resume_continues_the_run_of_wandb_and_a_new_start_does_not(tmp_path, wandb):
    ids = []
    for resumed in (0, 3, 0):
        writers = Writers(tmp_path, resumed, None, WANDB)
        ids.append(writers.loggers[0].run.id)
        writers.close()
    assert ids[0] == ids[1] != ids[2]


def test_a_wandb_that_does_not_start_is_one_line_with_what_to_do(tmp_path, wandb, monkeypatch):
    wandb.teardown()  # it reads the environment when it starts
    for name, value in (("WANDB_MODE", "online"), ("HOME", str(tmp_path)), ("NETRC", str(tmp_path / "netrc"))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(RunError, match=r"(No API key|api_key not) configured.*WANDB_MODE=offline"):
        Writers(tmp_path, 0, None, WANDB)


def test_a_wandb_that_is_missing_is_one_line_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'kdtrain\[wandb\]'"):
        WeightsAndBiases.ready("p")


def test_tensorboard_refuses_a_text_instead_of_dropping_it():
    TensorBoard.ready("")
    with pytest.raises(UsageError, match=r"^--log-to tensorboard:x: tensorboard takes no text; use --log-to tenso"):
        TensorBoard.ready("x")
