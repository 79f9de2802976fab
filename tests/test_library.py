"""The library as a user meets it: light to import, typed, honest about arguments, and without side effects."""

import doctest
import importlib
import inspect
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import kdtrain as kd
from kdtrain import errors
from kdtrain.config.choices import OBSERVERS
from kdtrain.config.sections import (
    CheckpointConfig,
    CodecConfig,
    DataConfig,
    MonitorConfig,
    OptimizerConfig,
    PrecisionConfig,
)
from kdtrain.config.values import SECTIONS
from kdtrain.models.output_head import refuse_vocabulary
from kdtrain.testing import tiny_model, tiny_tokenizer
from tests.token_kinds import train

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "cache" / "sparse"
WITH_AN_EXAMPLE = (
    *(
        "Alignment",
        "Cache",
        "CheckpointStore",
        "DistillationLoss",
        "LikelihoodTemperature",
        "PrecisionController",
        "Student",
    ),
    "quantize_",
)


@pytest.fixture
def arguments():
    """Name arguments in messages, as a library's do."""
    errors.name_flags(False)
    yield
    errors.name_flags()


def test_every_name_is_there_and_documented():
    assert sorted(kd.__all__) == sorted([*kd._modules(), "rollouts", "runs"])
    assert {*kd.__all__} <= {*dir(kd)}
    for name in kd.__all__:
        found = getattr(kd, name)
        assert inspect.getdoc(found), name
        assert found.__module__.startswith("kdtrain.")
    with pytest.raises(AttributeError, match="has no attribute 'Chache'"):
        _ = kd.Chache
    assert (ROOT / "kdtrain" / "py.typed").exists()


@pytest.mark.parametrize("name", WITH_AN_EXAMPLE)
def test_the_example_in_a_docstring_is_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "cache" / "t")
    module = importlib.import_module(kd._modules()[name][0])
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(kd, name), name, globs=dict(vars(module)))
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


@pytest.mark.parametrize("page", ["README.md", "docs/five-minutes.md", "docs/library.md"])
def test_the_python_of_a_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "cache" / "t")
    tiny_model("llama", 300, seed=3).save_pretrained(tmp_path / "path" / "to" / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "path" / "to" / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "cache" / "t" / "tokenizer")
    train("gpt2", 400).save_pretrained(tmp_path / "path" / "to" / "other")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    for registry in (SECTIONS, OBSERVERS):  # other tests count them
        registry.entries.pop("steep", None), registry._help.pop("steep", None)
    trained = names["trainer"].state.global_step if page == "README.md" else names["optimizer"].state
    assert trained
    assert names["student"].training and names["student"].model.model.training


def test_the_writer_of_the_page_works_for_a_cache_of_any_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n([^`]*kd\.CacheWriter.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    with kd.CacheWriter("cache/t", tokenizer=tiny_tokenizer(320), teacher="t", top_k=4) as writer:
        for split in ("train", "validation"):
            writer.add(torch.arange(311, 320), torch.zeros(8, 320), split=split)
    exec(compile(block, "library.md", "exec"), {"kd": kd, "cache": kd.Cache("cache/t")})
    assert kd.Cache("cache/mine").manifest.settings.vocab_size == 320


def test_the_loop_of_the_page_on_precision_returns_to_its_newest_good_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "precision.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(block, "docs/precision.md", "exec"), names)
    student = kd.Student(tiny_model("llama", 300, seed=3), kd.DistillationLoss(alpha=0.0))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    tokens = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "loss_mask": torch.ones(2, 16, dtype=torch.bool), "segments": torch.zeros(2, 16).int()}
    seen, loaded, calls = {}, {}, 0

    def batches():
        nonlocal calls
        while True:
            calls += 1
            if 7 <= calls <= 10:
                next(student.parameters()).data.fill_(math.nan)
            seen[calls] = {name: each.clone() for name, each in student.state_dict().items()}
            yield batch

    class Store(kd.CheckpointStore):
        def load(self, wanted="latest"):
            loaded[wanted] = super().load(wanted)
            return loaded[wanted]

    monkeypatch.setattr(kd, "CheckpointStore", Store)
    names["train"](student, optimizer, batches(), 12)
    ((name, state),) = loaded.items()
    assert (name, state["step"], calls) == ("window_3_iter5_quantized", 5, 17)
    # one step and three in the fallback are non-finite, and no step was taken from the weights after the sixth: the
    # eleventh call starts from those after the fifth
    assert all(torch.equal(seen[11][name], each) for name, each in state["student"].items())
    assert any(not torch.equal(seen[5][name], each) for name, each in seen[11].items())  # not from before it
    assert all(each.isfinite().all() for each in student.parameters())


def test_the_import_is_quick_and_loads_nothing_heavy():
    code = "import sys, time; t = time.process_time(); import kdtrain; t = time.process_time() - t; "
    code += "print(t, *(name for name in ('torch', 'numpy', 'transformers') if name in sys.modules))"
    quickest = min(
        (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
        for _ in range(3)
    )
    assert len(quickest) == 1
    assert float(quickest[0]) < 0.1


SETTINGS = """
import logging, warnings, torch
def settings():
    root = logging.getLogger()
    return (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed(), root.level, list(root.handlers),
        logging.getLogger("transformers").level, list(warnings.filters), torch._dynamo.config.cache_size_limit,
    )
import transformers, torch._dynamo, torch.optim.lr_scheduler, torch.distributed.checkpoint, datasets, h5py
transformers.PreTrainedModel, transformers.AutoModelForCausalLM, transformers.PreTrainedTokenizerFast
torch.manual_seed(5)
before = settings()
import kdtrain
for name in kdtrain.__all__:
    getattr(kdtrain, name)
assert settings() == before, (before, settings())
"""


def test_using_it_changes_no_setting_of_another_library():
    done = subprocess.run([sys.executable, "-c", SETTINGS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_students_model_is_the_users_own_and_stays_as_it_was():
    model = tiny_model("llama", 300, seed=3).train()
    before = {name: (id(each), each.dtype, each.clone()) for name, each in model.named_parameters()}
    attention, forward, modules = model.config._attn_implementation, model.forward, [type(m) for m in model.modules()]
    data = kd.Cache(GOLDEN)["train"]
    student = kd.Student(model, kd.DistillationLoss())
    student(**kd.collate([data[0], data[1]])).loss.backward()
    assert student.model.model is model
    assert (model.training, model.config._attn_implementation) == (True, attention)
    assert model.forward == forward and [type(m) for m in model.modules()] == modules
    for name, each in model.named_parameters():
        assert (id(each), each.dtype) == before[name][:2] and torch.equal(each, before[name][2])
        assert each.grad is not None


def test_the_batch_of_the_command_and_its_named_tensors_have_the_same_loss():
    for kind in ("sparse", "dense"):
        data, loss = kd.Cache(GOLDEN.parent / kind)["train"], kd.DistillationLoss(alpha=0.9, temperature=1.5)
        student = kd.Student(tiny_model("llama", 300, seed=3), loss)
        of_batch, of_fields = student(data.read([3, 1])), student(**kd.collate([data[3], data[1]]))
        assert torch.equal(of_batch.loss, of_fields.loss) and torch.equal(of_batch.kd, of_fields.kd)
        assert of_batch.tokens == of_fields.tokens
        knows = kd.Student(tiny_model("llama", 300, seed=3), loss, data=data)
        named = kd.collate([data[3], data[1]])
        named = {name: named[name] for name in named.keys() - {"knots", "num_samples"}}
        assert torch.equal(knows(**named).loss, of_batch.loss)
        halves = [student(**kd.collate([data[row]]), num_items_in_batch=of_batch.tokens).loss for row in (3, 1)]
        torch.testing.assert_close(sum(halves), of_batch.loss)


def batch_of(kind="sparse", **changes):
    data = kd.Cache(GOLDEN.parent / kind)["train"]
    found = {**kd.collate([data[0], data[1]]), **changes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def student_of(vocab_size=300, temperature=1.0, **loss):
    return kd.Student(
        tiny_model("llama", vocab_size, seed=3), kd.DistillationLoss(temperature=temperature, **loss)
    ).train()


def other_codec(fields, kind):
    """Return the same sequences as a cache with fewer knots, or with more samples, has them."""
    number = fields["knots"].shape[-1]
    kept = [0, number - 1, number, 2 * number - 1]
    if kind == "knots":
        return fields | {"tail": fields["tail"][..., kept], "knots": fields["knots"][..., [0, -1]]}
    return fields | {"num_samples": 2 * fields["num_samples"]}


@pytest.mark.parametrize("kind", ["knots", "samples"])
def test_each_batch_is_decoded_by_the_codec_of_its_own_cache(kind):
    dataset = kd.Cache(GOLDEN)["train"]
    first = kd.collate([dataset[0], dataset[1]])
    second = other_codec(first, kind)

    def losses(*batches):
        model = kd.Student(tiny_model("llama", 300), kd.DistillationLoss(temperature=1.2)).eval()
        return [float(model(**batch).kd) for batch in batches]

    assert losses(first, second, first) == [*losses(first), *losses(second), *losses(first)]
    assert losses(first) != losses(second)


def test_a_batch_of_sequences_from_caches_with_different_codecs_is_refused():
    dataset = kd.Cache(GOLDEN)["train"]
    mixed = kd.collate([dataset[0], other_codec(dataset[1], "samples")])
    model = kd.Student(tiny_model("llama", 300), kd.DistillationLoss())
    with pytest.raises(kd.UsageError, match="mixes sequences of caches"):
        model(**mixed)
    with pytest.raises(kd.UsageError, match="the batch has no tensor 'knots'"):
        model(**{name: tensor for name, tensor in mixed.items() if name != "knots"})


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_student_whose_vocabulary_is_too_small_gets_the_sentence_of_the_command(kind):
    manifest = kd.Cache(GOLDEN.parent / kind).manifest
    with pytest.raises(kd.UsageError) as command:
        refuse_vocabulary(250, manifest.vocab_size, manifest.settings.tokenizer_size)
    with pytest.raises(kd.UsageError) as library:
        student_of(250)(**batch_of(kind))
    assert str(library.value) == str(command.value)
    plain = {name: batch_of()[name] for name in ("tokens", "loss_mask")}
    with pytest.raises(kd.UsageError, match=r"has the token \d+, and the model a vocabulary of 20"):
        student_of(20, alpha=0.0)(**plain)
    kd.Student(tiny_model("llama", 320), kd.DistillationLoss(), vocab_size=300)(**batch_of(kind))  # padding is fine


@pytest.mark.parametrize(
    "temperature",
    [
        4.5,
        0.5,
        kd.ScheduledTemperature(1.0, 5.0, 10, "linear"),
        kd.LikelihoodTemperature(start=1.0, bounds=(0.5, 4.0)),
        kd.AdversarialTemperature(1.0, (1.0, 4.5), 10),
    ],
    ids=["4.5", "0.5", "scheduled", "likelihood", "adversarial"],
)
def test_a_temperature_outside_the_range_of_the_cache_is_refused(temperature):
    with pytest.raises(kd.UsageError, match=r"leaves the cache's range of 0\.667 to 4"):
        student_of(temperature=temperature)(**batch_of())
    student_of(temperature=4.0)(**batch_of())


def test_a_batch_without_targets_is_cross_entropy_only_if_alpha_is_0(arguments):
    plain = {name: batch_of()[name] for name in ("tokens", "loss_mask", "segments", "labels")}
    with pytest.raises(kd.UsageError, match="no targets of a teacher, and alpha is auto"):
        student_of()(**plain)
    output = student_of(alpha=0.0)(**plain)
    torch.testing.assert_close(output.loss.detach(), output.ce.float() / output.tokens)


@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf")])
def test_a_number_of_tokens_that_is_none_is_refused(number):
    with pytest.raises(kd.UsageError, match=f"num_items_in_batch {number} is not a number of tokens"):
        student_of()(**batch_of(), num_items_in_batch=number)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": None}, "no tensor 'tokens'"),
        ({"tokens": [[1, 2]]}, "no tensor 'tokens'"),
        ({"tokens": torch.zeros(2, 25)}, r"tokens are torch.float32 \[2, 25\]"),
        ({"loss_mask": None}, "no tensor 'loss_mask'"),
        ({"loss_mask": torch.ones(2, 24)}, "loss_mask is torch.float32"),
        ({"loss_mask": torch.ones(2, 25, dtype=torch.bool)}, r"loss_mask is torch.bool \[2, 25\]"),
        ({"labels": None}, "label_smoothing_factor"),
        ({"ids": torch.zeros(2, 23, 20, dtype=torch.int64)}, "targets"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_a_batch_that_is_not_one_is_a_usage_error(changes, message):
    with pytest.raises(kd.UsageError, match=message):
        student_of()(**batch_of(**changes))


def mixture(**options):
    return kd.Mixture([[{"tokens": torch.arange(5)}] * 6] * 2, **options)


def cache_writer(**options):
    return kd.CacheWriter("nowhere", tokenizer=tiny_tokenizer(300), teacher="t", **options)


def add(**options):
    cache_writer().add(torch.arange(5), torch.zeros(4, 300), split="train", **options)


def align(tokens):
    return kd.Alignment(tiny_tokenizer(300), tiny_tokenizer(280)).align(tokens)


def student(**options):
    return kd.Student(tiny_model("llama", 300), kd.DistillationLoss(), **options)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kd.Student(torch.nn.Linear(2, 2), kd.DistillationLoss()), "model is a Linear"),
        (lambda: kd.Student(tiny_model(), torch.nn.CrossEntropyLoss()), "loss is a CrossEntropyLoss"),
        (lambda: kd.Student(tiny_model(), kd.DistillationLoss(), mode="bf17"), "mode bf17 is not one of fp32"),
        (lambda: kd.Student(tiny_model(), kd.DistillationLoss(), vocab_size=301), "vocab_size 301 is not between"),
        (lambda: kd.DistillationLoss(divergence=3), "divergence 3 is not a name"),
        (lambda: kd.DistillationLoss(tail=None), "tail None is not a name"),
        (lambda: kd.DistillationLoss(alpha="high"), "alpha 'high' is not a number"),
        (lambda: kd.DistillationLoss(temperature="hot"), "temperature 'hot' is not a number"),
        (lambda: kd.quantize_("model", "fp8"), "model is a str"),
        (lambda: kd.Policy(quantized="fp8", threshold=float("nan")), "threshold nan"),
        (lambda: kd.Policy(quantized="fp8", rules=("loss", "lss")), "lss"),
        (lambda: kd.Policy(quantized="fp8", rules="loss"), "rules 'loss'"),
        (lambda: kd.Policy(quantized="fp8", window=0), "window 0"),
        (lambda: kd.Keep(rolling=0), "rolling 0"),
        (lambda: kd.Cache(3), "where 3 is not a path"),
        (lambda: kd.CheckpointStore(3), "folder 3 is not a path"),
        (
            lambda: kd.DistillConfig(student="s", out="o", cache="c", steps="many"),
            "steps 'many': a whole number is wanted",
        ),
        (lambda: kd.DistillConfig(student="s", out=3, cache="c"), "out 3: a path is wanted"),
        (lambda: kd.DistillConfig(student="s", out="o", cache="c", optimizer={"lr": 1}), "a OptimizerConfig is wanted"),
        *((lambda seed=seed: mixture(seed=seed), rf"seed {seed!r} is not a wh") for seed in (math.nan, -1, 1.5, "a")),
        *((lambda epoch=epoch: mixture().set_epoch(epoch), "epoch .* whole number") for epoch in (math.nan, -1, 1.5)),
        *((lambda size=size: mixture().batches(size), "batch_size .* whole") for size in (math.nan, 1.5, "3", True)),
        *((lambda one=one: cache_writer(dense=True, **one), "dense") for one in ({"top_k": 4}, {"num_samples": 4})),
        *((lambda m=m: add(loss_mask=[m] * 4), "loss_mask: .* 1 and 0") for m in (7, -1, 0.5, math.nan)),
        (lambda: cache_writer(head=3), "head is a int"),
        *((lambda t=t: align([t]), rf"tokens? .*{t}|whole numbers") for t in (-1, 300, 2**40, 1.7, True, "a")),
        (lambda: student(quantized="zzz"), "quantized zzz is not one of fp8, mxfp8, mxfp4 "),
        (lambda: student(quantized="fp8"), "quantized fp8 .* with the switch"),
        (lambda: student(switch=3), "switch is a int"),
        (lambda: student(hidden_loss=3), "hidden_loss is a int"),
        (lambda: student(hidden_weight=math.nan), "hidden_weight nan"),
        *((lambda size=size: student(vocab_size=size), "vocab_size .* whole number") for size in (1.5, True)),
        *((lambda path=path: kd.RunRecord.read(path), "is not a run") for path in ("nowhere", __file__)),
        (lambda: kd.RunRecord.read(3), "folder 3 is not a path"),
        *((lambda x=x: kd.Policy(quantized="fp8", window=x), "window .* whole number") for x in (1.5, True)),
        (lambda: kd.Policy(quantized="zzz"), "quantized zzz is not one of fp8, mxfp8, mxfp4"),
        (lambda: kd.Keep(rolling=True), "rolling True"),
        *((lambda x=x: kd.CheckpointStore("x").save(x, {}), "step .* whole number") for x in (-1, True, 1.5, "a")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_that_cannot_work_is_a_usage_error_that_names_it(make, message, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kd.UsageError, match=message):
        make()


def test_paths_may_be_text_and_names_may_be_paths():
    config = kd.DistillConfig(student=Path("s"), cache="c", out="o", checkpoint=CheckpointConfig(load="runs/a"))
    expected = kd.DistillConfig(
        student="s", cache=Path("c"), out=Path("o"), checkpoint=CheckpointConfig(load=Path("runs/a"))
    )
    assert config == expected and config.out == Path("o") and config.student == "s"
    assert kd.CacheTeacherConfig(teacher="t", out="c", data=DataConfig(data=Path("d"))).data.data == "d"


def test_a_position_that_a_switch_does_not_have_is_refused():
    switch = kd.quantize_(tiny_model("llama", 300), "mxfp4")
    with pytest.raises(kd.UsageError, match="position 'full' of the switch is unknown; use high, quantized"):
        switch.position = "full"
    assert switch.position == "quantized"


def test_a_student_is_in_the_mode_of_its_model():
    made = tiny_model("gpt2", 300, seed=3, resid_pdrop=0.5)
    batch = batch_of()
    for training in (False, True):
        student = kd.Student(made.train(training), kd.DistillationLoss())
        drops = not torch.equal(student(**batch).loss, student(**batch).loss)
        assert (student.training, made.training, drops) == (training, training, training)
    student.eval()
    assert not made.training and torch.equal(student(**batch).loss, student(**batch).loss)


def test_a_cache_and_its_splits_are_containers():
    cache = kd.Cache(str(GOLDEN))
    data = cache["train"]
    assert (list(cache), "train" in cache, "test" in cache) == (["train", "validation"], True, False)
    assert torch.equal(data[-1]["tokens"], data[len(data) - 1]["tokens"])
    assert len(list(data)) == len(data)
    for index in (len(data), -len(data) - 1):
        with pytest.raises(IndexError):
            data[index]
    with pytest.raises(TypeError):
        data[1.5]
    assert repr(cache) == f"Cache('{GOLDEN}'): train: 5, validation: 2 sequences of 24 tokens"
    assert repr(data) == f"CacheReader('{GOLDEN}', 'train'): 5 sequences of 24 tokens"


def test_the_loss_can_be_called_with_public_names_alone(arguments):
    hidden, weight, teacher = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.randn(6, 9)
    labels, mask = torch.randint(9, (6,)), torch.tensor([True] * 5 + [False])
    targets = kd.DenseTargets.from_logits(teacher, labels)
    common = {"temperature": 2.0, "alpha": 1.0, "vocab_size": 9}
    output = kd.distillation_loss(hidden, kd.Head(weight), labels, mask, targets, normalizer=5, **common)
    log_p, log_q = (torch.log_softmax(each[mask] / 2, -1) for each in (teacher, hidden @ weight.T))
    torch.testing.assert_close(output.loss, 4 * (log_p.exp() * (log_p - log_q)).sum(-1).mean())
    wrong = {
        "labels_N is float32": {"labels_N": labels.float()},
        "mask_N is int64": {"mask_N": mask.long()},
        "hidden_ND is int64": {"hidden_ND": hidden.long()},
        "targets have 5 rows": {"targets": targets[:5]},
        "vocab_size 10 is not between": {"vocab_size": 10},
        "normalizer nan": {"normalizer": float("nan")},
        "alpha 2 is": {"alpha": 2},
        "temperature -1 is": {"temperature": -1},
        "head's weight is": {"head": kd.Head(torch.randn(9, 3))},
    }
    given = {"hidden_ND": hidden, "head": kd.Head(weight), "labels_N": labels, "mask_N": mask, "targets": targets}
    for message, changes in wrong.items():
        with pytest.raises(kd.UsageError, match=message):
            kd.distillation_loss(**{**given, **common, "normalizer": 5, **changes})


def test_errors_name_arguments_in_a_library_and_flags_in_a_command(arguments):
    with pytest.raises(kd.UsageError, match=r"^top_k -1 must be at least 0$") as caught:
        CodecConfig(top_k=-1)
    errors.name_flags()
    assert str(caught.value) == "--top-k -1 must be at least 0"
    errors.name_flags(False)
    assert str(kd.RunError("leave --no-early-stopping out of kdtrain-x--y")) == (
        "leave early_stopping=False out of kdtrain-x--y"
    )
    with pytest.raises(kd.UsageError, match="divergence foward-kl is unknown; perhaps you meant 'forward-kl'"):
        kd.DistillationLoss(divergence="foward-kl")
    with pytest.raises(kd.UsageError, match=r"^alpha 2 is not between 0 and 1$"):
        kd.DistillationLoss(alpha=2)
    with pytest.raises(kd.UsageError, match=r"^temperature 0\.0 is not above 0$"):
        kd.DistillationLoss(temperature=0.0)
    with pytest.raises(kd.UsageError, match="recipe rowwise is not one of mxfp4"):
        kd.quantize_(tiny_model("llama", 300), "mxfp4", recipe="rowwise")
    with pytest.raises(kd.UsageError, match="mode int4 is not"):
        kd.quantize_(tiny_model("llama", 300), "int4")
    with pytest.raises(kd.UsageError, match="holds no cache"):
        kd.Cache(ROOT / "docs")
    with pytest.raises(kd.UsageError, match=r"the state's entry 'x\.y' is a set"):
        kd.CheckpointStore(ROOT / "nowhere").save(1, {"x": {"y": {1, 2}}})


def test_without_train_the_value_of_the_loss_is_cross_entropy_and_its_gradient_that_of_distillation():
    student, batch = student_of(alpha=0.9), batch_of()
    found = []
    for mode in (True, False):
        student.train(mode).zero_grad()
        output = student(**batch)
        output.loss.backward()
        found.append([each.grad.clone() for each in student.parameters()])
        mean = (output.ce / output.tokens).float()
        assert (float(output.loss.detach()) == float(mean)) != mode and output.kd > 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with torch.no_grad():
        evaluated = student(**batch)
    assert float(evaluated.loss) == float(mean) and evaluated.kd == output.kd and evaluated.rows.shape[0] == 2


def test_weights_in_half_precision_that_train_are_warned_of_once_with_the_remedy():
    def warned(model, mode="fp32"):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            student = kd.Student(model.eval(), kd.DistillationLoss(), mode=mode)
            with torch.no_grad():
                student(**batch_of())
            assert not found  # of evaluation alone
            for _ in range(2):
                student.train()
        return [str(each.message) for each in found]

    for dtype in (torch.bfloat16, torch.float16):
        [text] = warned(tiny_model("llama", 300).to(dtype))
        assert str(dtype) in text and "dtype=torch.float32" in text
    frozen = tiny_model("llama", 300).to(torch.bfloat16).requires_grad_(False)
    assert warned(frozen) == warned(tiny_model("llama", 300), "bf16") == []


def test_the_commands_are_functions_that_return_what_they_made(tmp_path, arguments, caplog):
    cache = kd.cache_teacher(
        teacher=str(ROOT / "teachers" / "stdlib-5m.toml"),
        out=tmp_path / "cache",
        data="stdlib",
        **{"seq_len": 16, "num_sequences": 8, "validation_sequences": 4, "top_k": 4, "precision": "fp32"},
    )
    with pytest.raises(kd.UsageError, match="unknown option 'top_l'"):
        kd.cache_teacher(teacher="stdlib-5m", out=tmp_path / "cache", top_l=4)
    assert (len(cache["train"]), cache.verify()) == (8, [])
    tiny_model("llama", 2048, seed=3).save_pretrained(tmp_path / "model")
    config = kd.DistillConfig(
        student=str(tmp_path / "model"),
        cache=tmp_path / "cache",
        out=tmp_path / "run",
        steps=2,
        batch_size=4,
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
        precision=PrecisionConfig(precision="fp32", compile=False),
        monitor=MonitorConfig(log_to="none"),
    )
    result = kd.distill(config)
    assert (result["stop_reason"], result["steps"]) == ("done", 2)
    assert (Path(result["student"]) / "model.safetensors").exists()
    with pytest.raises(kd.UsageError, match="holds no cache"):
        kd.distill(kd.DistillConfig(student=str(tmp_path / "model"), cache=tmp_path, out=tmp_path / "other"))


def test_a_package_adds_a_name_to_the_library(tmp_path, monkeypatch):
    info = tmp_path / "more-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kdtrain.library]\nshout = more_names\nruns = more_names\nleave = ends\n")
    (tmp_path / "more_names.py").write_text("def shout():\n    return 'loud'\nruns = shout\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shout", "runs"):
        monkeypatch.delitem(vars(kd), name, raising=False)
    assert kd.shout() == "loud"
    assert kd.runs.__module__ == "kdtrain.plugins.papers.runs"
    with pytest.raises(AttributeError, match=r"kdtrain\.leave: ends of the package more fails to load: SystemExit: 3"):
        kd.leave()
    with pytest.raises(AttributeError, match="no attribute 'whisper'"):
        kd.whisper()
