"""An exported student is the student that was evaluated, for anyone who has transformers and not kdtrain."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kdtrain.cache.read.reader import CacheReader


def cross_entropy(folder, cache):
    """Compute the mean over the unmasked tokens of the validation split, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reader = CacheReader(cache, "validation")
    batch = reader.read(range(len(reader)))
    with torch.no_grad():
        logits_BTV = model(batch.tokens[:, :-1]).logits
    losses_NT = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    return losses_NT[batch.loss_mask.flatten()].double().mean().item()


def test_the_exported_student_has_the_loss_that_evaluate_reported(bench, distilled):
    exported = bench.run("export", "run", "--out", "nowhere/../exported", "--json").json
    assert (bench.root / exported["student"]).samefile(bench.root / "exported")
    assert exported["checkpoint"] == f"step-{distilled.json['best_step']:08d}"
    reported = bench.run("evaluate", "--student", "exported", "--cache", "cache", "--json").json
    assert cross_entropy(bench.root / "exported", bench.root / "cache") == pytest.approx(reported["loss"], rel=1e-6)
    assert reported["loss"] == pytest.approx(distilled.json["best_validation_loss"], rel=1e-5)
    # the run exports the same model at its end
    written, ours = (bench.root / each / "model.safetensors" for each in ("run/student", "exported"))
    assert written.read_bytes() == ours.read_bytes()


def test_the_exported_tokenizer_is_the_teachers(bench, distilled):
    text = "def f(x):\n    return x + 1"
    student, teacher = (AutoTokenizer.from_pretrained(bench.root / each) for each in ("run/student", "teacher"))
    assert student(text)["input_ids"] == teacher(text)["input_ids"]
    assert student.decode(student(text)["input_ids"]) == text


def test_another_checkpoint_is_exported_by_name_and_replaces_only_with_overwrite(bench, distilled):
    argv = ("export", "run", "--checkpoint", "step-00000004", "--out", "early")
    assert bench.run(*argv, "--json").json["step"] == 4
    assert cross_entropy(bench.root / "early", bench.root / "cache") != pytest.approx(
        distilled.json["best_validation_loss"]
    )
    refused = bench.run(*argv)
    assert refused.code == 2
    assert "early" in refused.refusal() and "--overwrite" in refused.refusal()
    assert bench.run(*argv, "--overwrite").code == 0
