"""Names give the tier, steps and rollbacks the newest checkpoint, and retention keeps what is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtrain.checkpoint.tiers import CheckpointEntry as Entry
from kdtrain.checkpoint.tiers import Keep, is_apart, is_name, is_planned, name_of, ordered, removable, step_in, tier

SPECIAL = (
    "interrupted-00000123",
    "rollback_1_iter120",
    "switch_to_bf16_iter150",
    "window_1_iter100_quantized",
    "step-5",
)


def test_tier_and_step_follow_from_the_name():
    assert (name_of("rolling", 250), name_of("epoch", 3)) == ("step-00000250", "epoch-0003")
    assert (tier("step-00000250"), tier("epoch-0003")) == ("rolling", "epoch")
    assert {tier(name) for name in SPECIAL if not name.startswith("window")} == {"special"}
    assert (
        tier("window_1_iter100_quantized") == tier("window_1_iter100_bf16") == tier("window_end_2_iter200") == "window"
    )
    assert tier("window_end") == tier("window_1_iter100") == "special"
    assert [step_in(name) for name in SPECIAL] == [123, 120, 150, 100, 5]
    assert (step_in("step-00000250"), step_in("epoch-0003"), step_in("mine")) == (250, -1, -1)
    assert tier(name_of("rolling", 10**9)) == "rolling"
    assert (tier(name_of("exploded", 53)), step_in(name_of("exploded", 53))) == ("exploded", 53)
    assert is_apart(name_of("exploded", 53)) and not is_planned(name_of("exploded", 53))
    assert not any(map(is_apart, SPECIAL))


@pytest.mark.parametrize(
    "name", ["", ".step-00000010.tmp", "latest", "best", "step-00000010.left-1", "mine.damaged-12", "a/b"]
)
def test_links_and_hidden_and_set_aside_names_are_not_names_of_checkpoints(name):
    assert not is_name(name)


def test_the_order_is_step_then_rollbacks_and_special_ones_come_last():
    names = ["step-00000020", "rollback_1_iter020", "epoch-0001", "interrupted-00000020", "step-00000100", "before"]
    entries = [Entry(*each) for each in zip(names, (20, 20, 20, 20, 100, 3), (0, 1, 0, 0, 0, 5), strict=True)]
    expected = ["before", "epoch-0001", "step-00000020", "interrupted-00000020", "rollback_1_iter020", "step-00000100"]
    assert [entry.name for entry in ordered(entries)] == expected


def test_the_recovery_buffer_decides_which_of_its_checkpoints_are_kept_and_they_replace_no_others():
    entries = [Entry(f"window_end_{number}_iter{5 * number}", 5 * number) for number in range(1, 5)]
    entries += [Entry("switch_to_bf16_iter7", 7), Entry("interrupted-00000002", 2)]
    gone = removable(entries, Keep(special=1), ["window_end_2_iter10"])
    assert gone == ["interrupted-00000002", "window_end_1_iter5", "window_end_3_iter15"]


def test_each_tier_is_counted_by_itself():
    entries = [Entry(name_of("rolling", step), step) for step in range(1, 7)]
    entries += [Entry(name_of("epoch", number), 2 * number) for number in range(1, 4)]
    entries += [Entry(f"interrupted-{step:08d}", step) for step in (1, 4)]
    gone = removable(entries, Keep(rolling=2, epoch=2, special=1))
    assert gone == [
        *("step-00000001", "interrupted-00000001", "epoch-0001", "step-00000002", "step-00000003", "step-00000004")
    ]


def test_damaged_and_protected_ones_stay_and_do_not_count():
    entries = [Entry(name_of("rolling", step), step, valid=step < 5) for step in range(1, 7)]
    assert removable(entries, Keep(rolling=2), [name_of("rolling", 1)]) == ["step-00000002"]


names = st.builds(name_of, st.sampled_from(["rolling", "epoch"]), st.integers(1, 9)) | st.sampled_from(SPECIAL)
entries_of = st.lists(
    st.builds(Entry, name=names, step=st.integers(0, 9), rollbacks=st.integers(0, 2), valid=st.booleans()),
    unique_by=lambda entry: entry.name,
)


@given(entries_of, st.tuples(*[st.integers(1, 3)] * 3), st.sets(names))
def test_what_is_removed_is_never_needed(entries, counts, protected):
    keep = Keep(*counts)
    gone = set(removable(entries, keep, protected))
    by_name = {entry.name: entry for entry in entries}
    left = [entry for entry in ordered(entries) if entry.valid and entry.name not in gone]
    valid = [entry for entry in ordered(entries) if entry.valid]
    assert all(by_name[name].valid for name in gone) and not gone & protected
    assert left[-1:] == valid[-1:]
    for kind, count in (("rolling", keep.rolling), ("epoch", keep.epoch), ("special", keep.special)):
        kept = [entry for entry in left if tier(entry.name) == kind]
        newest = [entry for entry in valid if tier(entry.name) == kind][-count:]
        assert set(newest) <= set(kept)
        assert {entry.name for entry in kept} - {entry.name for entry in newest} <= protected
