"""A student in `transformers.Trainer`: what is saved, resumed and evaluated."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import load_sharded_checkpoint

import kdtrain as kd
from kdtrain.testing import tiny_model
from kdtrain.training.sources.cache import CachedSource
from kdtrain.training.student import LOSS_FILE
from kdtrain.training.validate import summary, validate
from tests.test_library import GOLDEN, student_of


def test_transformers_saves_and_resumes_a_student_with_a_tied_head(tmp_path):
    data = kd.Cache(GOLDEN)["train"]

    def trained(folder, steps, **how):
        student = kd.Student(tiny_model("llama", 300, seed=3), kd.DistillationLoss())
        options = {"max_steps": steps, "save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True}
        options |= {"per_device_train_batch_size": 2, "disable_tqdm": True, "lr_scheduler_type": "constant"}
        args = TrainingArguments(output_dir=str(tmp_path / folder), **options)
        trainer = Trainer(model=student, args=args, train_dataset=data, data_collator=kd.collate)
        trainer.train(**how)
        return student

    whole, _ = trained("whole", 4), trained("cut", 2)
    resumed = trained("cut", 4, resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    model = resumed.model.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert "model.model.lm_head.weight" not in ours
    assert all(torch.equal(ours[name], each) for name, each in theirs.items())
    kd.Student(tiny_model("llama", 300), kd.DistillationLoss()).load_state_dict(ours)  # strict


# by its name in transformers 5.17 and since
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)


@pytest.mark.parametrize(
    "option",
    [{CHECKPOINTING: True}, {"neftune_noise_alpha": 5.0}, {"include_num_input_tokens_seen": "all"}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_of_trainer_has_its_effect_on_a_student(tmp_path, option):
    plain, changed = trained(tmp_path / "plain"), trained(tmp_path / "changed", **option)
    losses = [each.state.log_history[0]["loss"] for each in (plain, changed)]
    model = changed.model.model.model
    if CHECKPOINTING in option:
        assert getattr(model, f"is_{CHECKPOINTING}") and losses[0] == losses[1]
    elif "neftune_noise_alpha" in option:
        assert losses[0] != losses[1]
    else:
        assert changed.state.num_input_tokens_seen == 2 * 2 * 25


def trained(folder, **options):
    options = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True, **options}
    options |= {"per_device_train_batch_size": 2, "disable_tqdm": True, "save_steps": 1, "output_dir": str(folder)}
    temperature = kd.LikelihoodTemperature(1.5, (1.0, 4.0))
    cache = kd.Cache(GOLDEN)
    student, arguments = student_of(temperature=temperature), TrainingArguments(**options)
    trainer = Trainer(student, arguments, kd.collate, cache["train"], cache["validation"])
    trainer.train()
    return trainer


def test_label_smoothing_is_refused_with_what_to_leave_out(tmp_path):
    with pytest.raises(kd.UsageError, match="leave both out"):
        trained(tmp_path, label_smoothing_factor=0.1)


def test_what_trainer_or_a_student_saves_is_what_transformers_loads(tmp_path):
    trainer = trained(tmp_path / "run")
    student = trainer.model
    trainer.save_model(str(tmp_path / "by-trainer"))
    student.save_pretrained(tmp_path / "by-student")
    assert student.config is student.model.model.config
    own = student.model.model.state_dict()
    for name in ("by-trainer", "by-student", "run/checkpoint-2"):
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        loaded = model.state_dict()
        assert loaded.keys() == own.keys() and all(torch.equal(each, own[key]) for key, each in loaded.items())
        assert not info["unexpected_keys"] and not info["missing_keys"]
        # what loads every *.safetensors of a folder, as a server does, meets the model alone
        assert [each.name for each in (tmp_path / name).glob("*.safetensors")] == ["model.safetensors"]
        assert load_file(tmp_path / name / LOSS_FILE).keys() == {
            "loss.temperature.theta",
            *(f"loss.alpha.{each}" for each in ("known", "present", "then", "trained")),
        }

    # a checkpoint of Trainer brings the learned temperature back as well
    fresh = student_of(temperature=kd.LikelihoodTemperature(3.0, (1.0, 4.0)))
    Trainer(fresh, trainer.args, kd.collate, kd.Cache(GOLDEN)["train"]).train(resume_from_checkpoint=True)
    assert torch.equal(fresh.temperature.value(), student.temperature.value())
    means = fresh.loss.alpha.trained
    moved = (means - student.loss.alpha.trained)[0]
    assert moved[:2].abs().max() < 0.1 and moved[2] == 1  # its step at rate 0 moves them
    expected = student.state_dict() | {"loss.alpha.trained": means}
    assert all(torch.equal(each, expected[key]) for key, each in fresh.state_dict().items())


def test_trainer_loads_the_best_students_loss_from_beside_its_weights_and_from_shards_too(tmp_path):
    best = {"metric_for_best_model": "loss", "greater_is_better": True}  # the first step is kept
    trainer = trained(tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, **best)
    steps = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert max(steps, key=lambda entry: entry["eval_loss"])["step"] == 1
    first, last = (load_file(tmp_path / f"checkpoint-{step}" / LOSS_FILE) for step in (1, 2))
    held = trainer.model.loss.state_dict()
    assert all(torch.equal(held[name.removeprefix("loss.")], each) for name, each in first.items())
    assert not torch.equal(first["loss.alpha.trained"], last["loss.alpha.trained"])

    trainer.model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    fresh = student_of(temperature=kd.LikelihoodTemperature(3.0, (1.0, 4.0)))
    load_sharded_checkpoint(fresh, str(tmp_path / "shards"), strict=False)
    assert all(torch.equal(each, fresh.state_dict()[name]) for name, each in trainer.model.state_dict().items())


class Masked(list):
    """The sequences of a split, of which later ones have fewer unmasked tokens; a source of a run too."""

    def __init__(self, data):
        super().__init__(dict(data[row]) for row in range(len(data)))
        for row, each in enumerate(self):
            each["loss_mask"] = each["loss_mask"].clone()
            each["loss_mask"][: 4 * row] = False
            each["labels"] = each["labels"].clone()
            each["labels"][1:][~each["loss_mask"]] = -100
        self.collator = kd.Student(tiny_model("llama", 300), kd.DistillationLoss())._batch

    def read(self, rows):
        return self.collator(kd.collate([self[row] for row in rows]))


@pytest.mark.parametrize("kind, loss", [("sparse", {}), ("sparse", {"alpha": 0.0}), ("dense", {"divergence": "jsd"})])
def test_the_evaluation_of_trainer_is_the_validation_of_the_command(tmp_path, kind, loss):
    student, cache = student_of(**loss), kd.Cache(GOLDEN.parent / kind)
    options = {"per_device_eval_batch_size": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), **options)

    def evaluated(split, metrics=None):
        trainer = Trainer(student, args, kd.collate, eval_dataset=split, compute_metrics=metrics)
        return trainer.evaluate()

    expected = summary(validate(student.eval(), CachedSource(cache["validation"]), micro=3, batches=None))
    assert evaluated(cache["validation"])["eval_loss"] == pytest.approx(expected["loss"], rel=1e-6)
    masked = Masked(cache["train"])
    assert len({int(each["loss_mask"].sum()) for each in masked}) == len(masked) == 5  # the last batch is smaller
    expected, found = (
        summary(validate(student, masked, micro=3, batches=None)),
        evaluated(masked, kd.evaluation_metrics),
    )
    for name, value in {**expected, "ce": expected["loss"]}.items():
        assert found.get(f"eval_{name}") == (value if value is None else pytest.approx(value, rel=1e-5)), name
    assert found["eval_tokens"] == expected["tokens"] and {"eval_loss", "eval_ce", "eval_kl"} <= found.keys()
