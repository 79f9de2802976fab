"""The stream of a run in rounds, the figures of a round and the rules by which its text collapses."""

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from kdtrain.cache.write.shard_writer import ShardRows
from kdtrain.config.commands import DistillConfig
from kdtrain.config.values import configured
from kdtrain.data.order import Order
from kdtrain.errors import RunError
from kdtrain.monitor.rules import RULES, Signs, findings
from kdtrain.plugins.rounds.answers import SEEN
from kdtrain.plugins.rounds.figures import beside_first, refuse_collapse, repeated
from kdtrain.plugins.rounds.plan import RoundWriter
from kdtrain.plugins.rounds.source import STRIDE, Rounds, StreamShape
from kdtrain.plugins.rounds.writing import Inserted, seen_rows
from kdtrain.training.sources.source import Facts

FACTS = Facts(name="a", identity="b", seq_len=8, vocab_size=30, tokenizer_size=30)


class Text:
    """Fixed text of 50 rows."""

    facts, overlaps, repeatable = FACTS, True, True

    def __len__(self):
        return 50


def rounds(tmp_path, **shape):
    usual = {"rows": 12, "sequences": 24, "cold": 0, "stale": 0, "share": "1"}
    shape = StreamShape(**usual | shape)
    fixed = Text() if shape.share != "1" or shape.cold else None
    return Rounds(FACTS, shape, tmp_path, seed=3, writer=None, fixed=fixed)


def test_a_round_reads_each_of_its_rows_once_a_pass_in_an_order_of_its_own(tmp_path):
    stream = rounds(tmp_path).order(3)
    found = stream.batch(0, 72)
    assert (found // STRIDE == np.repeat([1, 2, 3], 24)).all()
    rows = (found % STRIDE).reshape(6, 12)
    assert (np.sort(rows, 1) == np.arange(12)).all() and len({tuple(row) for row in rows}) == 6
    assert (np.concatenate([stream.batch(at, 5) for at in range(0, 70, 5)]) == found[:70]).all()


def test_fixed_text_keeps_its_own_order_whatever_the_share_of_rollouts(tmp_path):
    alone = Order.shuffled(3, 50).batch(0, 200)
    third = Fraction("0.3333333333333333")
    assert rounds(tmp_path, share=str(third)).shape.before(2**40) == 2**40 * third.numerator // third.denominator
    for share, cold in ("1/2", 0), ("1/4", 10), ("9/10", 7), ("1", 5), ("9999/10000", 0), (str(third), 0):
        found = rounds(tmp_path, share=share, cold=cold).order(3).batch(0, 200)
        fixed = found[found < STRIDE]
        assert (fixed == alone[: len(fixed)]).all() and (found[:cold] < STRIDE).all()
        drawn = found[cold:] >= STRIDE
        part = eval(share)
        assert abs(drawn.sum() - part * (200 - cold)) < 1
        assert (found[cold:][drawn] // STRIDE == np.flatnonzero(drawn) // 24 + 1).all()


def test_texts_grow_to_their_last_length_in_the_last_round_also_where_an_epoch_is_one_of_fixed_text():
    given = {"on_policy": True, "rollout_share": 0.25, "cache": "c", "epochs": 4, "batch_size": 8, "round_rows": 16}
    options = {"student": "s", "out": "o", "teacher": "t", "data": "d", "max_new_tokens": "2:20"} | given
    config = configured(DistillConfig, None, options)
    data = SimpleNamespace(config=config, given=config.plugins["rounds"], teacher=None, fixed={"train": range(36)})
    shape = StreamShape(rows=16, sequences=64, cold=0, stale=0, share="1/4")
    writer = RoundWriter(data, None, shape, FACTS, None, {})
    assert [writer._length(number) for number in (1, 2, 3)] == [2, 11, 20]


def test_stale_rounds_take_turns_and_give_other_rows_as_they_grow_old(tmp_path):
    found = rounds(tmp_path, stale=2, sequences=12).order(3).batch(0, 12 * 6)
    for number in range(3, 7):
        counts = np.bincount(found[12 * (number - 1) : 12 * number] // STRIDE, minlength=8)
        assert counts[number - 2 : number + 1].tolist() == [4, 4, 4]
    third = found[found // STRIDE == 3] % STRIDE
    assert sorted(third.tolist()) == [*range(12)]  # in its three rounds


def test_a_state_names_the_rounds_before_a_place_and_a_rollback_begins_another_attempt(tmp_path):
    train = rounds(tmp_path)
    train.rounds, train._digests = {1: 1, 2: 1, 3: 1}, {}
    train._digest = lambda found: "same"
    assert train.state_dict(0)["rounds"] == [] and train.state_dict(24)["rounds"] == [[1, 1]]
    inside, behind = train.state_dict(60), train.state_dict(25)
    assert inside["rounds"] == [[1, 1], [2, 1], [3, 1]] and behind["rounds"] == [[1, 1], [2, 1]]
    train.load_state_dict(inside)
    assert train.attempt == 1
    train.load_state_dict(behind)
    assert (train.attempt, train.rounds) == (2, {1: 1, 2: 1})
    assert train._folder(3, 2).name == "round-0003-2" and train._folder(3, 1).name == "round-0003"
    with pytest.raises(ValueError):
        train.load_state_dict({"attempt": 0, "rounds": [], "sha256": "same"})


@pytest.mark.parametrize(
    "kind, bad, good",
    [
        ("rollouts-length", {"length": 4.0, "first/length": 10.0}, {"length": 6.0, "first/length": 10.0}),
        ("rollouts-length", {"length": 21.0, "first/length": 10.0}, {"length": 19.0, "first/length": 10.0}),
        ("rollouts-ended", {"ended": 0.2, "first/ended": 0.5}, {"ended": 0.3, "first/ended": 0.5}),
        ("rollouts-repeat", {"repeated": 0.31}, {"repeated": 0.3}),
        ("rollouts-strange", {"teacher_loss": 5.0, "bigram_loss": 4.9}, {"teacher_loss": 4.8, "bigram_loss": 4.9}),
    ],
)
def test_each_sign_of_collapse_is_a_rule_with_a_knob_and_can_end_the_run(kind, bad, good):
    bad, good = ({f"rollouts/{name}": value for name, value in each.items()} for each in (bad, good))
    assert [*findings(Signs(step=1, numbers=bad), each_step=True)] == [kind]
    assert findings(Signs(step=1, numbers=good)) == findings(Signs(step=1)) == {}
    with pytest.raises(RunError, match="--on-collapse stop") as raised:
        refuse_collapse(bad)
    assert RULES[kind][0].knob in str(raised.value) and raised.value.reason == "collapse"
    refuse_collapse(good)


def test_more_room_for_texts_raises_the_length_that_is_too_long_and_not_the_one_that_is_too_short():
    first = {"rollouts/length": 60.0, "rollouts/ended": 0.9, "rollouts/room": 128.0}
    for length, kinds in (66.0, []), (470.0, []), (490.0, ["rollouts-length"]), (29.0, ["rollouts-length"]):
        found = beside_first(first | {"rollouts/length": length, "rollouts/room": 512.0}, first)
        assert [*findings(Signs(step=1, numbers=found), each_step=True)] == kinds
        assert found["rollouts/first/length"] == 60


def test_repetition_is_counted_within_what_was_written():
    tokens = np.array([[0, 1, 2, 3, 1, 2, 3, 1], [0, 9, 9, 9, 9, 9, 5, 5]])
    mask = np.ones((2, 7), bool)
    mask[1, :] = [False, True, True, True, True, False, False]
    # 1 2 3 1 2 3 1: five 3-grams, two again; 9 9 9 9: two, one again
    assert repeated(tokens, mask) == pytest.approx(3 / 7)


def test_what_the_teacher_alone_reads_stands_behind_what_a_template_begins_with():
    tokens, mask = np.arange(12).reshape(2, 6), np.zeros((2, 5), bool)
    mask[:, 3:] = True
    rows = ShardRows("train-00000", "train", 0, tokens, mask, np.zeros((2, 5), np.int32), {})
    found, back = seen_rows(rows, Inserted(1, (90, 91)))
    assert found.tokens.tolist() == [[0, 90, 91, 1, 2, 3, 4, 5], [6, 90, 91, 7, 8, 9, 10, 11]]
    assert (found.loss_mask[:, 2:] == mask).all() and not found.loss_mask[:, :2].any()
    assert (back == np.arange(2, 7)).all()
    own = np.array([[7, 8, 9, 10, 11, -1], [7, -1, -1, -1, -1, -1]])
    found, back = seen_rows(replace(rows, kept={SEEN: own}), None)  # the text of both is its last two tokens
    assert found.tokens.tolist() == [[7, 8, 9, 10, 11, 4, 5], [7, 10, 11, 11, 11, 11, 11]]
    assert found.loss_mask.sum() == 4 and np.take_along_axis(found.loss_mask, back, 1)[mask].all()
