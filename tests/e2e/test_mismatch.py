"""Inputs that do not belong together are refused with the digest that differs, and accepted only by name."""

import shutil

from kdtrain.testing import tiny_tokenizer


def test_another_tokenizer_and_another_cache_need_to_be_allowed_by_name(bench, cached, distilled) -> None:
    tokenizer = tiny_tokenizer(300)
    tokenizer.add_tokens(["<|other|>"])
    tokenizer.save_pretrained(bench.root / "other-tokenizer")
    bench.student("other", tokenizer="other-tokenizer", num_hidden_layers=1)
    steps = ("--steps", 1, *bench.fast, *bench.eager)
    train = ("distill", "--cache", "cache", "--student", "other.toml", "--out", "other-run", *steps)
    refused = bench.run(*train)
    assert refused.code == 2
    assert "another tokenizer" in refused.refusal()
    assert "--allow-mismatch tokenizer" in refused.refusal()
    assert bench.run(*train, "--allow-mismatch", "cache").code == 2
    allowed = bench.run(*train, "--allow-mismatch", "tokenizer").ok().stderr
    assert "another tokenizer" in allowed and "the student gets the teacher's tokenizer" in allowed

    small = (*bench.small, "--top-k", 12, "--seed", 9)
    bench.run("cache-teacher", "--teacher", "teacher", "--out", "cache-9", *small).ok()
    train = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "swapped", *steps)
    bench.run(*train).ok()
    shutil.copytree(bench.root / "cache", bench.root / "cache-kept")
    shutil.rmtree(bench.root / "cache")
    try:
        shutil.copytree(bench.root / "cache-9", bench.root / "cache")
        longer = (*train, "--steps", 2)
        assert "another cache" in bench.run(*longer).refusal()
        assert "another cache" in bench.run(*longer, "--allow-mismatch", "cache").ok().stderr
    finally:
        shutil.rmtree(bench.root / "cache")
        (bench.root / "cache-kept").rename(bench.root / "cache")
