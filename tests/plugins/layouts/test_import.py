"""`kdtrain import`: published teacher outputs become a cache that trains a student, or one line says why not."""

import json
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet, table

from kdtrain.library import Cache

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "import"
MADE_BY = ("--teacher", "stdlib-5m", "--tokenizer", ROOT / "teachers" / "stdlib-5m")
PLAIN = ("--layout", "distillkit", "--compressor", GOLDEN / "plain.yaml", *MADE_BY)
STUDENT = f"""tokenizer = '{ROOT}/teachers/stdlib-5m'
[config]
model_type = 'llama'
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 128
tie_word_embeddings = true
"""


@pytest.fixture(scope="module")
def imported(bench) -> dict:
    (bench.root / "import.toml").write_text(STUDENT)
    return bench.run("import", GOLDEN / "plain.parquet", *PLAIN, "--out", "plain", "--json").json


def moved(bench, name: str, first: int) -> Path:
    """Write the golden set, its texts without their first tokens: entry i is then about token i + 1 - `first`."""
    there = parquet.read_table(GOLDEN / "plain.parquet")
    texts = [row[first:] for row in there["input_ids"].to_pylist()]
    entries = {
        column: [row[: len(text)] for row, text in zip(there[column].to_pylist(), texts, strict=True)]
        for column in ("compressed_logprobs", "bytepacked_indices")
    }
    parquet.write_table(table({"input_ids": texts, **entries}), bench.root / name)
    return bench.root / name


def test_a_student_learns_from_an_imported_cache_at_temperature_one(bench, imported) -> None:
    assert imported["rows"] == 14 and imported["alignment"]["shift"] == 0
    assert imported["counted"] == imported["positions"] == 14 * 40 and imported["filled_up"] == 0
    assert 0.7 < imported["kept_mass"] < 0.99 and 0 < imported["kl_at_most"] < 2.5 and 0.5 < imported["labels_kept"] < 1
    assert imported["unknown"] == ["dtype", "revision", "attention", "temperature"]
    manifest = Cache(bench.root / "plain").manifest
    assert manifest.settings.teacher["spec"] == "stdlib-5m"
    assert manifest.settings.teacher["dtype"] == "unknown" and manifest.origin["compressor"]["k"] == 16
    assert [each["name"] for each in manifest.origin["files"]] == ["plain.parquet"]
    assert bench.run("verify", "plain", "--json").json["ok"]
    page = " ".join(bench.run("inspect", "plain").ok().stdout.split())
    assert "imported from plain.parquet in the layout distillkit, shift 0" in page
    assert "for T = 1 only (what lies outside of the entries is not known)" in page and "log Z" not in page
    assert bench.run("inspect", "plain", "--json").json["origin"] == manifest.origin
    assert "| imported from | plain.parquet in the layout" in (bench.root / "plain" / "README.md").read_text()
    assert "not known of the teacher dtype, revision, attention, temperature" in page
    train = ("distill", "--cache", "plain", "--student", "import.toml", *bench.fast, *bench.eager)
    losses = bench.run(*train, "--steps", 30, "--eval-freq", 15, "--out", "import-run", "--json").json
    assert losses["steps"] == 30
    for more, why in (
        (("--temperature", 2), "leave the cache's range of 1 to 1"),
        (("--temperature-mode", "likelihood"), "the cache is valid at T = 1 only; use --temperature-mode fixed"),
    ):
        refused = bench.run(*train, "--steps", 2, "--out", "import-hot", *more)
        assert refused.code == 2 and why in refused.refusal()


def test_entries_off_by_one_are_refused_with_the_shift_that_mends_them(bench, imported) -> None:
    source = moved(bench, "moved.parquet", 1)
    refused = bench.run("import", source, *PLAIN, "--out", "moved", "--json")
    assert refused.code == 2
    assert "about the token before the next one" in refused.refusal() and "give --shift -1" in refused.refusal()
    assert not (bench.root / "moved").exists()
    mended = bench.run("import", source, *PLAIN, "--out", "moved", "--shift", -1, "--json").json
    assert mended["alignment"]["shift"] == 0 and mended["shift"] == -1
    assert mended["counted"] == 14 * 39 and mended["label_loss"] == pytest.approx(imported["label_loss"], rel=0.1)
    page = bench.run("import", source, *PLAIN, "--out", "moved", "--shift", -1).stdout  # it is finished
    assert "at --shift -1 aligned" in page and page.splitlines()[-1].startswith("Next: kdtrain distill --cache moved ")


LISTS = ("topk-parquet", "--tokens-column", "tokens", "--ids-column", "top_ids", "--logprobs-column", "top_logprobs")


@pytest.mark.parametrize("layout", [(*LISTS, "--shift", -1), ("prompt-logprobs",)], ids=lambda each: each[0])
def test_log_probabilities_as_a_server_returns_those_of_a_prompt_are_imported_from_jsonl(bench, imported, layout):
    golden = np.load(GOLDEN / "plain.npz", allow_pickle=False)
    texts = parquet.read_table(GOLDEN / "plain.parquet")["input_ids"].to_pylist()
    columns = {"top_ids": golden["ids"].tolist(), "top_logprobs": golden["logprobs"].astype(float).tolist()}
    # entry i is about token i, and there is none for the first
    rows = [
        {"tokens": text, **{name: [None, *each[row]] for name, each in columns.items()}}
        for row, text in enumerate(texts)
    ]
    (bench.root / "lists.jsonl").write_text("\n".join(map(json.dumps, rows)))
    again = bench.run("import", "lists.jsonl", "--layout", *layout, *MADE_BY, "--out", layout[0], "--json").json
    for name in ("sequences", "kept_mass", "label_loss", "labels_kept", "counted"):
        assert again[name] == imported[name]
    digests = [{name: each["tokens_sha256"] for name, each in Cache(bench.root / name).manifest.splits.items()}
               for name in (layout[0], "plain")]  # fmt: skip
    assert digests[0] == digests[1]


def test_a_killed_import_resumes_and_equals_one_at_once(bench, imported) -> None:
    command = ("import", GOLDEN / "plain.parquet", *PLAIN, "--sequences-per-shard", 4, "--json")
    whole = bench.run(*command, "--out", "whole").json
    for place in ("cache.shard.before-rename:kill:2", "cache.sidecar.before-rename:kill:1", "cache.before-finish:kill"):
        assert bench.run(*command, "--out", "parts", fault=place).code == -9
    assert bench.run(*command, "--out", "parts").json["digest"] == whole["digest"]
    assert bench.run(*command, "--out", "parts").json["digest"] == whole["digest"]  # finished: nothing to do
    other = bench.run(*command, "--out", "parts", "--top-k", 4)
    assert other.code == 2 and "finished cache with other settings" in other.refusal()


def test_a_resume_keeps_nothing_of_a_source_that_changed_under_the_same_name_and_size(bench) -> None:
    def write(logprob: float) -> None:
        texts = np.random.RandomState(0).randint(5, 2000, (40, 9)).tolist()
        rows = [
            {"input_ids": text, "target_token_ids": [[label, 3] for label in text[1:]],
             "target_logprobs": [[logprob, -2.5]] * 8}
            for text in texts
        ]  # fmt: skip
        (bench.root / "same.jsonl").write_text("\n".join(map(json.dumps, rows)))

    command = ("import", "same.jsonl", "--layout", "topk-parquet", *MADE_BY, "--out", "same", "--json")
    write(-0.1)
    assert bench.run(*command).json["label_loss"] == pytest.approx(0.1)
    write(-0.9)
    finished = bench.run(*command)
    assert finished.code == 2 and "finished cache with other settings (data.files_sha256" in finished.refusal()
    (bench.root / "same" / "manifest.json").unlink()
    unfinished = bench.run(*command)
    assert unfinished.code == 2 and "unfinished cache with other settings (data.files_sha256" in unfinished.refusal()


def test_a_cut_of_an_imported_cache_says_where_it_comes_from(bench, imported) -> None:
    bench.run("subset", "plain", "--rows", "0:5", "--out", "plain-cut").ok()
    (parent,) = Cache(bench.root / "plain-cut").manifest.parents
    assert parent["origin"] == Cache(bench.root / "plain").manifest.origin
    page = bench.run("inspect", "plain-cut").ok().stdout
    assert "of stdlib-5m, rows 0:5 of train, imported from plain.parquet" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hf:org/name", *PLAIN), "import reads local files; download the data set first"),
        (("nowhere", *PLAIN), "nowhere: there is no such file or folder"),
        ((GOLDEN / "delta.parquet", *PLAIN), "numbers in bytepacked_indices, the compressor's settings stand for"),
        ((GOLDEN / "plain.parquet", "--layout", "distillkit", *MADE_BY), "needs --compressor FILE.yaml"),
        ((GOLDEN / "plain.parquet", "--layout", "parquet", *MADE_BY), "--layout parquet is unknown"),
        ((GOLDEN / "plain.parquet", "--layout", "topk-parquet", *MADE_BY), "has no column 'target_token_ids'"),
        ((GOLDEN / "plain.parquet", *PLAIN, "--temperature", 2), "cannot be a cache"),
        ((GOLDEN / "plain.parquet", *PLAIN, "--vocab-size", 100), "is less than the 2048 of the source"),
        ((GOLDEN / "plain.parquet", *PLAIN, "--top-k", 17), "--top-k 17 is more than the 16 entries of the source"),
        ((GOLDEN / "plain.parquet", *PLAIN, "--ids-column", "ids"), "--ids-column has no effect"),
        (("empty", *PLAIN), "empty: give a .parquet or .jsonl file"),
    ],
)
def test_what_cannot_be_imported_is_one_line(bench, words, message) -> None:
    (bench.root / "empty").mkdir(exist_ok=True)
    done = bench.run("import", *words, "--out", "refused")
    assert done.code == 2 and message in done.refusal()
    assert not (bench.root / "refused").exists()


def scaled() -> list[dict]:
    """Scale a top-k so that it sums to 1."""
    golden = np.load(GOLDEN / "plain.npz", allow_pickle=False)
    texts = parquet.read_table(GOLDEN / "plain.parquet")["input_ids"].to_pylist()
    logprobs = golden["logprobs"] - np.log(np.exp(golden["logprobs"]).sum(-1, keepdims=True))
    columns = zip(texts, golden["ids"].tolist(), logprobs.tolist(), strict=True)
    return [dict(zip(("input_ids", "target_token_ids", "target_logprobs"), each, strict=True)) for each in columns]


def rows_of(ids: list[int], logprobs: list[float]) -> list[dict]:
    targets = {"target_token_ids": [ids] * 4, "target_logprobs": [logprobs] * 4}
    return [{"input_ids": [first, 2, 3, 4], **targets} for first in range(20)]


@pytest.mark.parametrize(
    ("rows", "more", "why"),
    [
        (rows_of([5, 6], [2.5, -1.0]), (), "60 of 60 positions of a sample are no distributions"),
        (scaled(), (), "of the labels lie outside of them: they were renormalised"),
        (rows_of([5], [-1.0]), ("--top-k", 2), "60 of 60 positions of a sample have fewer than 2 entries"),
    ],
    ids=["logits", "renormalised", "too few"],
)
def test_entries_that_cannot_be_kept_are_refused_before_anything_is_written(bench, rows, more, why) -> None:
    (bench.root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ("import", "rows.jsonl", "--layout", "topk-parquet", *MADE_BY, "--json")
    done = bench.run(*command, "--out", "refused", *more)
    assert done.code == 2 and why in done.refusal() and not (bench.root / "refused").exists()
    if "--top-k" in more:
        assert bench.run(*command, "--out", "short").json["counted"] == 60
