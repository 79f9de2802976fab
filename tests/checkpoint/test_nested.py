"""What `CheckpointStore` saves it loads again, entry by entry; what it could not load is refused before pruning."""

import pytest
import torch
from hypothesis import strategies as st

import kdtrain as kd
from kdtrain.checkpoint import nested, store
from kdtrain.checkpoint.nested import CheckpointStore, _escaped
from kdtrain.checkpoint.store import Store, load
from kdtrain.checkpoint.tiers import Keep
from kdtrain.errors import UsageError

ODD = ("", "a", "b", "a.b", "a/b", "a.b#2", "a%002fb", "%", "#1", "1", "__metadata__", "a\0", "\ud800", "\x1b")
keys = st.sampled_from(ODD) | st.integers(-2, 2) | st.text(max_size=3)


def deep(depth):
    state = torch.ones(1)
    for _ in range(depth):
        state = {"a": state}
    return state


def test_keys_of_any_characters_come_back_with_their_own_tensors(tmp_path):
    values = iter(range(10_000))

    def tensor():
        return torch.tensor(next(values))

    state = {key: {inner: tensor() for inner in (*ODD, 1, -1)} for key in (*ODD, 2)} | {1: tensor(), "list": [tensor()]}
    CheckpointStore(tmp_path).save(1, state)
    found = CheckpointStore(tmp_path).load()
    assert repr(found) == repr(state)
    assert "/".join(map(_escaped, ("model", "layers.0.weight"))) == "model/layers.0.weight"


def test_a_checkpoint_whose_tensors_were_named_otherwise_is_still_read(tmp_path):
    """As they were before names were escaped: the tree says which tensor is where."""
    tree = {"mapping": [["a", {"mapping": [["b", {"tensor": "a.b"}]]}], ["a.b", {"tensor": "a.b#1"}], [1, 2]]}
    tensors = {"a.b": torch.zeros(1), "a.b#1": torch.ones(1)}
    Store(tmp_path).save("step-00000001", 1, tensors, {"tree": tree, "metrics": {}}, alone=True)
    assert CheckpointStore(tmp_path).load() == {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 1: 2}


REFUSED = {
    "nested too deep": deep(21),
    "too deep: at most": deep(5000),
    "nested too": {"a": eval("[" * 70 + "]" * 70)},
    "more than 1,048,576 entries": {"a": [0] * 2**20},
    "more than 33,554,432 bytes": {"a": "x" * 2**25},
    "cannot be written as JSON": {"a": 10**5000},
    "dtype torch.complex64": {"a": torch.ones(1, dtype=torch.complex64)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_state_that_could_not_be_loaded_is_not_saved_and_the_last_one_not_pruned(tmp_path, reason):
    checkpoints = CheckpointStore(tmp_path, keep=Keep(rolling=1))
    checkpoints.save(1, {"good": 1})
    with pytest.raises(UsageError, match=reason):
        checkpoints.save(2, REFUSED[reason])
    assert checkpoints.load() == {"good": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    checkpoints.save(3, deep(20))
    assert checkpoints.load() == deep(20)


def test_a_checkpoint_that_cannot_be_read_back_is_passed_over_as_a_damaged_one_is(tmp_path, monkeypatch):
    checkpoints = CheckpointStore(tmp_path, keep=Keep(rolling=1))
    checkpoints.save(1, {"good": 1})
    with monkeypatch.context() as earlier:  # a version that did not read back what it saved
        earlier.setattr(store, "unreadable", lambda path: None)
        earlier.setattr(Store, "prune", lambda *_: None)
        checkpoints.save(2, deep(21))
        checkpoints.save(3, {"a": 1})
        earlier.setattr(nested, "_escaped", lambda key: key)
        checkpoints.save(4, {"__metadata__": torch.ones(1)})
    assert CheckpointStore(tmp_path).load("step-00000003") == {"a": 1}
    for step, wrong in ((2, "state.json: it is nested too deep"), (4, "cannot be read")):
        with pytest.raises(RuntimeError, match=f"step-0000000{step} is damaged: .*{wrong}"):
            CheckpointStore(tmp_path).load(f"step-0000000{step}")
    assert CheckpointStore(tmp_path).load() == {"a": 1}
    checkpoints = CheckpointStore(tmp_path, keep=Keep(rolling=1))
    checkpoints.save(5, {"b": 1})
    assert checkpoints.names() == ["step-00000002", "step-00000004", "step-00000005"]


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/kdtrain-x", ".x", "a/b", "a\0", "latest", "best", "x.old-1", "x.replaced-1", "x.left-1", 5]
)
def test_a_name_that_is_not_one_of_a_checkpoint_is_an_error_of_the_caller(tmp_path, name):
    checkpoints = CheckpointStore(tmp_path / "in" / "c")
    with pytest.raises(ValueError, match=r"^a checkpoint cannot be called .*; use a name like") as caught:
        checkpoints.save(1, {"a": 1}, name=name)
    assert isinstance(caught.value, UsageError)
    assert not any(tmp_path.rglob("*"))


def test_what_a_checkpoint_of_a_run_could_not_be_loaded_with_is_refused_too(tmp_path):
    with pytest.raises(UsageError, match="checkpoint x is not saved, because it could not be loaded again"):
        Store(tmp_path).save("x", 1, {"\ud800": torch.ones(1)}, {})
    Store(tmp_path).save("x", 1, {"a": torch.ones(1)}, {})
    assert load(tmp_path / "x").tensors == {"a": torch.ones(1)}


def test_a_state_of_any_depth_comes_back_as_it_was(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": [1, (2.5, None), "x", True]}
    saved = kd.CheckpointStore(tmp_path / "c", keep=kd.Keep(rolling=2))
    for step in range(1, 5):
        saved.save(step, state, {"loss": abs(step - 2.0)})
    assert saved.names() == ["step-00000002", "step-00000003", "step-00000004"]  # the best one is kept
    found = saved.load("best")
    assert found["more"] == state["more"] and list(found["optimizer"]["state"]) == [0, 1]
    torch.optim.AdamW(model.parameters()).load_state_dict(found["optimizer"])
    shard = next((tmp_path / "c" / "step-00000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert torch.equal(saved.load()["model"]["weight"], model.weight)  # the one before, which is whole
    with pytest.raises(kd.RunError, match="step-00000004 is damaged"):
        saved.load("step-00000004")


IN_A_GROUP = """
import sys, torch, torch.distributed as dist
import kdtrain as kd
dist.init_process_group("gloo")
saved = kd.CheckpointStore(sys.argv[1])
if dist.get_rank() == 0:
    saved.save(1, {"w": torch.ones(2)}, {"loss": 1.0})
dist.barrier()
assert saved.load("best")["w"].tolist() == [1, 1]
print("loaded")
dist.destroy_process_group()
"""


def test_in_a_group_of_the_users_own_one_rank_saves_and_all_load(run_ranks, tmp_path):
    (tmp_path / "script.py").write_text(IN_A_GROUP)
    assert run_ranks(tmp_path / "script.py", 2, tmp_path / "c") == ["loaded\n", "loaded\n"]
