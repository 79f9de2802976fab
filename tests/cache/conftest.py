"""Rows and a teacher that are pure functions of a seed, and caches built from them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from kdtrain.cache.format import names as cache_format
from kdtrain.cache.format.manifest import CacheSettings, read_manifest
from kdtrain.cache.format.spec import KNOTS, CodecSpec
from kdtrain.cache.write.writer import write_cache
from kdtrain.data.packed import PackedRow
from tests.fetched import files_of
from tests.web import Repository, Web, hurry, serving, with_hub

sys.path.insert(0, str(Path(__file__).parent))

SEQ_LEN = 16


class Workshop:
    """The parts with which a test builds a cache."""

    def rows(self, number: int, *, vocab_size: int = 64, seed: int = 0) -> Iterator[PackedRow]:
        random = np.random.RandomState(seed)
        for _ in range(number):
            tokens = random.randint(0, vocab_size, SEQ_LEN + 1).astype(np.int32)
            mask = random.rand(SEQ_LEN) < 0.9
            yield PackedRow(tokens, mask, np.sort(random.randint(0, 3, SEQ_LEN)).astype(np.int32))

    def teacher(self, vocab_size: int = 64) -> Callable[..., torch.Tensor]:
        table = 3 * torch.randn(vocab_size, min(vocab_size, 512), generator=torch.Generator().manual_seed(1))

        def logits(tokens_BT: torch.Tensor, segments_BT: torch.Tensor | None) -> torch.Tensor:
            logits_BTV = table[tokens_BT].repeat(1, 1, -(-vocab_size // table.shape[1]))[..., :vocab_size]
            return logits_BTV if segments_BT is None else logits_BTV + segments_BT[..., None]

        return logits

    def settings(self, codec: CodecSpec, **changes: object) -> CacheSettings:
        plain = {"codec": codec, "seq_len": SEQ_LEN, "tokenizer_size": codec.vocab_size, "seed": 3}
        plain |= {"sequences_per_shard": 4, "data": {"source": "synthetic"}, "sequences": {"train": 10}}
        return CacheSettings(**{**plain, **changes})  # type: ignore[arg-type]

    def splits(self, vocab_size: int = 64, train: int = 10) -> dict[str, Iterator[PackedRow]]:
        both = {"train": (train, 0), "validation": (3, 1)}
        return {name: self.rows(n, vocab_size=vocab_size, seed=s) for name, (n, s) in both.items()}

    def build(self, folder: Path, codec: CodecSpec, tokenizer: Path | None = None, **changes: object) -> Path:
        teacher = None if codec.kind == "tokens" else self.teacher(codec.vocab_size)
        splits = self.splits(codec.vocab_size)
        write_cache(folder, self.settings(codec, **changes), splits, teacher=teacher, tokenizer=tokenizer, batch_size=3)
        return folder

    def content(self, folder: Path) -> dict[str, np.ndarray]:
        """Read every data set of every shard."""
        found = {}
        for path in sorted((folder / cache_format.SHARDS).glob("*.h5")):
            with h5py.File(path) as file:
                parts = {name: file[name] for name in file if name != cache_format.DICTIONARY}
                if cache_format.DICTIONARY in file:
                    parts |= {
                        f"{cache_format.DICTIONARY}/{name}": each
                        for name, each in file[cache_format.DICTIONARY].items()
                    }
                found |= {f"{path.name}/{name}": dataset[:] for name, dataset in parts.items()}
        return found

    def assert_equal(self, one: Path, other: Path) -> None:
        """Assert that two caches are equal, data set by data set."""
        left, right = self.content(one), self.content(other)
        assert left.keys() == right.keys()
        for name, values in left.items():
            assert np.array_equal(values, right[name], equal_nan=values.dtype.kind == "f"), name
        ours, theirs = read_manifest(one), read_manifest(other)
        assert ours.splits["train"]["tokens_sha256"] == theirs.splits["train"]["tokens_sha256"]
        assert ours.fidelity == theirs.fidelity


@pytest.fixture(scope="session")
def workshop() -> Workshop:
    return Workshop()


@pytest.fixture(scope="session")
def codecs() -> dict[str, CodecSpec]:
    return {
        "top_k": CodecSpec(kind="sparse", vocab_size=64, top_k=6),
        "num_samples": CodecSpec(kind="sparse", vocab_size=64, num_samples=12),
        "weighted": CodecSpec(kind="sparse", vocab_size=64, num_samples=12, knots=KNOTS),
        "both": CodecSpec(kind="sparse", vocab_size=64, top_k=4, num_samples=8),
        "whole": CodecSpec(kind="sparse", vocab_size=64, top_k=64),
        "dense": CodecSpec(kind="dense", vocab_size=64),
        "tokens": CodecSpec(kind="tokens", vocab_size=64),
    }


@pytest.fixture(scope="session")
def whole(workshop: Workshop, codecs: dict[str, CodecSpec], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the uninterrupted cache of the codec `both`, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return workshop.build(folder / "cache", codecs["both"], folder / "tokenizer")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hurry(monkeypatch)
    return tmp_path / "home"


@pytest.fixture
def web(whole: Path, home: Path) -> Iterator[Web]:
    with serving(whole) as found:
        yield found


@pytest.fixture
def hub(whole: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Serve a stand-in of the hub with the cache as the data set org/cache."""
    with serving() as found:
        with_hub(found.url, home.parent / "hf", monkeypatch)
        found.hub["org/cache"] = Repository()
        found.hub["org/cache"].commit(files_of(whole))
        yield found
