"""`kd.CacheWriter`: the cache of anyone's own logits is the cache that `cache-teacher` writes of them."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kdtrain as kd
from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.spec import SAMPLING, CodecSpec
from kdtrain.cache.write.writer import write_cache
from kdtrain.files import file_digest
from kdtrain.testing import tiny_tokenizer
from tests.cache.fork_kit import exit_of

WIDTH = 300
CODECS = {"both": {"top_k": 4, "num_samples": 8}, "samples": {"num_samples": 12}, "dense": {}}


@pytest.fixture(scope="module")
def sequences(workshop):
    """Return (split, row, logits) of every sequence, by a table of logits."""
    teacher, splits = workshop.teacher(WIDTH), workshop.splits(WIDTH)

    def logits(row):
        return teacher(torch.from_numpy(row.tokens[None, :-1]).long(), None)[0]

    return [(split, row, logits(row)) for split, rows in splits.items() for row in rows]


def writer(folder: Path, kind: str = "both", **changes: object) -> kd.CacheWriter:
    how = {"teacher": "table", "tokenizer": tiny_tokenizer(WIDTH), "seed": 3, "sequences_per_shard": 4}
    return kd.CacheWriter(folder, **{**how, **CODECS[kind], "dense": kind == "dense", **changes})  # type: ignore[arg-type]


def fill(into: kd.CacheWriter, sequences, asked=lambda logits: logits) -> None:
    for split, row, logits in sequences:
        into.add(row.tokens, asked(logits), split=split, loss_mask=row.loss_mask)


def shards(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in (folder / cache_format.SHARDS).glob("*.h5")}


def write(folder: Path, sequences, kind: str = "both", asked=lambda logits: logits, **changes: object) -> kd.Cache:
    with writer(folder, kind, **changes) as own:
        fill(own, sequences, asked)
    return kd.Cache(folder)


@pytest.mark.parametrize("kind", CODECS)
def test_the_shards_and_the_fidelity_are_those_of_a_teacher_with_these_logits(workshop, sequences, tmp_path, kind):
    codec = CodecSpec(kind="dense" if kind == "dense" else "sparse", vocab_size=WIDTH, **CODECS[kind])
    settings = workshop.settings(codec, sampling=SAMPLING if codec.num_samples else None, tokenizer_size=WIDTH)
    rows = {split: [] for split, *_ in sequences}
    for split, row, _ in sequences:
        rows[split].append(replace(row, segments=np.zeros_like(row.segments)))
    theirs = write_cache(tmp_path / "a", settings, rows, teacher=workshop.teacher(WIDTH))
    ours = write(tmp_path / "b", sequences, kind).manifest
    assert shards(tmp_path / "a") == shards(tmp_path / "b") and len(shards(tmp_path / "a")) == 4
    assert (ours.splits, ours.fidelity) == (theirs.splits, theirs.fidelity)
    assert (ours.temperature_range, ours.bytes_per_token) == (theirs.temperature_range, theirs.bytes_per_token)
    assert ours.settings.teacher == {"spec": "table"} and not kd.Cache(tmp_path / "b").verify()


def test_log_probabilities_give_the_same_targets_and_hidden_states_with_a_head_the_same_shards(sequences, tmp_path):
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(WIDTH, 8, generator=generator), torch.randn(16, 8, generator=generator)
    one = [(split, row, hidden) for split, row, _ in sequences]
    write(tmp_path / "hidden", one, head=head)
    write(tmp_path / "logits", one, asked=lambda states: (states @ head.T).numpy())
    write(tmp_path / "logprobs", one, asked=lambda states: (states @ head.T).log_softmax(-1))
    assert shards(tmp_path / "hidden") == shards(tmp_path / "logits")
    left, right = (kd.Cache(tmp_path / name)["validation"][0] for name in ("logits", "logprobs"))
    assert torch.equal(left["ids"], right["ids"]) if "ids" in left else left.keys() == right.keys()


def test_a_killed_writer_loses_the_shard_in_work_and_resumes_without_asking_for_what_is_there(sequences, tmp_path):
    write(tmp_path / "whole", sequences)
    calls = []

    def asked(logits):
        return lambda: calls.append(1) or logits

    killed = exit_of(lambda: fill(writer(tmp_path / "cut"), sequences), "cache.sidecar.after-publish:kill:2")
    assert killed == -9 and sorted(shards(tmp_path / "cut")) == ["train-00000.h5", "train-00001.h5"]
    write(tmp_path / "cut", sequences, asked=asked)
    assert len(calls) == len(sequences) - 8 + 1, "the first sequence tells the vocabulary"
    assert shards(tmp_path / "cut") == shards(tmp_path / "whole")
    assert kd.Cache(tmp_path / "cut").manifest.to_json() == kd.Cache(tmp_path / "whole").manifest.to_json()
    calls.clear()
    write(tmp_path / "cut", sequences, asked=asked)
    assert len(calls) == 1, "a finished cache needs nothing"


def test_other_sequences_or_settings_are_refused_in_a_folder_that_has_some(sequences, tmp_path, caplog):
    with pytest.raises(kd.UsageError, match="no sequence for validation"):
        write(tmp_path / "c", sequences[:8])
    with pytest.raises(kd.UsageError, match=r"shard train-00000 of other sequences; give the same sequences"):
        write(tmp_path / "c", sequences[1:])
    assert not caplog.records, "nothing is made again"
    with pytest.raises(kd.UsageError, match=r"unfinished cache with other settings \(teacher.spec: table there"):
        write(tmp_path / "c", sequences, teacher="another")
    write(tmp_path / "c", sequences)
    before = shards(tmp_path / "c")
    more = [each for each in sequences if each[0] == "train"]
    for others in ([*sequences[:8], *sequences[10:]], [*sequences, *more]):
        with pytest.raises(kd.UsageError, match="finished cache of 10 sequences for train; give the same"):
            write(tmp_path / "c", others)
    assert shards(tmp_path / "c") == before


@pytest.mark.parametrize("end", [kd.CacheWriter.finish, kd.CacheWriter.close])
def test_finish_and_close_wait_for_a_sequence_that_another_thread_adds(sequences, tmp_path, end):
    own, (split, row, logits) = writer(tmp_path / "c"), sequences[0]
    fill(own, sequences)
    ending = threading.Thread(target=end, args=(own,))
    waits = []

    def slow():
        ending.start()
        ending.join(0.3)
        waits.append(ending.is_alive())
        return logits

    own.add(row.tokens, slow, split=split, loss_mask=row.loss_mask)
    ending.join(60)
    assert waits == [True]
    write(tmp_path / "c", [*sequences, sequences[0]])
    assert len(kd.Cache(tmp_path / "c")["train"]) == 11


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("called", [False, True])
def test_the_same_sequences_with_other_logits_are_refused_and_with_nearly_equal_ones_resume(
    sequences, tmp_path, kind, called
):
    interrupted = writer(tmp_path / "a", kind)
    fill(interrupted, sequences[:7])
    interrupted.close()
    before = shards(tmp_path / "a")
    assert before
    with pytest.raises(kd.UsageError, match=r"other logits .*nats apart"):
        fill(writer(tmp_path / "a", kind), sequences, lambda logits: (lambda: -logits) if called else -logits)
    assert before == shards(tmp_path / "a")
    write(tmp_path / "a", sequences, kind, lambda logits: logits + 0.01 * torch.randn_like(logits))
    with pytest.raises(kd.UsageError, match="other logits"):
        write(tmp_path / "a", sequences, kind, lambda logits: -logits)


def test_threads_that_add_lose_no_row(tmp_path):
    rows, logits = [np.full(9, number) for number in range(40)], torch.randn(8, WIDTH)
    with writer(tmp_path / "a", sequences_per_shard=7) as own:
        own.add(rows[0], logits, split="validation")
        jobs = [
            threading.Thread(target=lambda part: [own.add(row, logits, split="train") for row in part], args=[part])
            for part in np.split(np.array(rows), 4)
        ]
        for each in jobs:
            each.start()
        for each in jobs:
            each.join()
    assert sorted(int(each["tokens"][0]) for each in kd.Cache(tmp_path / "a")["train"]) == [*range(40)]


def test_a_writer_that_is_finished_or_closed_takes_nothing(sequences, tmp_path):
    own = writer(tmp_path / "c")
    fill(own, sequences[:7])
    own.close()
    with pytest.raises(kd.UsageError, match="finished or closed; make another"):
        fill(own, sequences[7:])
    assert len(shards(tmp_path / "c")) == 1
    with writer(tmp_path / "c") as own:
        fill(own, sequences)
        assert own.finish().verify() == []
        with pytest.raises(kd.UsageError, match="finished or closed; make another"):
            fill(own, sequences[-1:])


def test_the_fidelity_of_equal_sequences_is_that_of_the_logits_of_each(sequences, tmp_path):
    (_, row, logits), (_, _, others) = sequences[0], sequences[1]
    made = {}
    for name, second in (("equal", row.tokens), ("other", np.append(row.tokens[:-1] ^ 1, row.tokens[-1]))):
        both = [("validation", row, logits), ("validation", replace(row, tokens=second), others)]
        made[name] = write(tmp_path / name, [("train", row, logits), *both], "dense").manifest.fidelity
    assert made["equal"]["T=1"]["kl_bucket"] == made["other"]["T=1"]["kl_bucket"] < 1e-4


def test_a_sequence_goes_to_a_split_by_its_own_tokens(sequences, tmp_path):
    row, logits = sequences[0][1:]
    with writer(tmp_path / "c") as own:
        for number in range(60):
            tokens = row.tokens.copy()
            tokens[0] = number
            own.add(tokens, logits)
    cache = kd.Cache(tmp_path / "c")
    firsts = {split: {int(each["tokens"][0]) for each in cache[split]} for split in ("train", "validation")}
    assert firsts["train"] | firsts["validation"] == {*range(60)}
    assert 1 <= len(firsts["validation"]) <= 9


def test_a_sequence_with_a_non_finite_logit_is_kept_with_its_loss_masked_out(sequences, tmp_path):
    bad = [(split, row, logits.clone()) for split, row, logits in sequences]
    bad[-1][2][3, 5] = torch.nan
    with pytest.raises(kd.RunError, match="validation 2"):
        write(tmp_path / "c", bad)


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda row, logits: {"tokens": row.tokens[None]}, "give one sequence of T"),
        (lambda row, logits: {"tokens": row.tokens.astype(float)}, "give one sequence of T"),
        (lambda row, logits: {"tokens": row.tokens + 290}, "beyond the logits' vocabulary of 300"),
        (lambda row, logits: {"tokens": row.tokens[:-1], "logits": logits[:-1]}, "16 tokens, and the first one 17"),
        (lambda row, logits: {"logits": torch.zeros(17, WIDTH)}, r"give \[16, V\], a row for each token but the last"),
        (lambda row, logits: {"logits": logits[:, :256]}, "logits of 256 entries, and the first ones had 300"),
        (lambda row, logits: {"loss_mask": np.ones(17)}, r"loss_mask of shape \[17\]: give \[16\]"),
        (lambda row, logits: {"segments": np.zeros(16, int)}, "with every sequence, or with none"),
        (lambda row, logits: {"segments": np.full(16, 16)}, "number the documents of a sequence from 0 to at most 15"),
        (lambda row, logits: {"segments": np.zeros(16)}, "segments of float64: give whole numbers"),
        (lambda row, logits: {"segments": ["a"] * 16}, "segments: give a tensor or an array of numbers"),
        (lambda row, logits: {"logits": "many"}, "logits: give a tensor or an array of numbers"),
        (lambda row, logits: {"logits": lambda: None}, "logits: give a tensor or an array of numbers"),
        (lambda row, logits: {"split": "test"}, "use train or validation"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_argument(sequences, tmp_path, change, line):
    _, row, logits = sequences[0]
    own = writer(tmp_path / "c")
    own.add(row.tokens, logits, split="train")
    with pytest.raises(kd.UsageError, match=line):
        own.add(**{"tokens": row.tokens, "logits": logits, "split": "train", **change(row, logits)})
    own.close()


@pytest.mark.parametrize(
    "change, line",
    [
        ({"teacher": {"name": "x"}}, "give a name, or values with spec"),
        ({"data": {"day": object()}}, "hold text, finite numbers"),
        ({"sequences_per_shard": 0}, "at least 1"),
        ({"seed": -1}, "seed -1 is not a whole number of at least 0"),
        ({"seed": 1.5}, "seed 1.5 is not a whole"),
        ({"seed": torch.tensor(1.5)}, r"seed tensor\(1\.5000\) is not a whole"),
        ({"seed": np.array([1, 2])}, r"seed array\(\[1, 2\]\) is not a whole"),
        ({"seed": 2**63}, "is not a whole number"),
        ({"num_samples": 0, "top_k": 0}, "stores nothing"),
        ({"tokenizer": "nowhere/at/all"}, "nowhere"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(tmp_path, change, line):
    with pytest.raises(kd.UsageError, match=line):
        writer(tmp_path / "c", **change)
    assert not (tmp_path / "c").exists()
