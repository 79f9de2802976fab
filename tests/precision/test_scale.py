"""The loss scale of fp16: an overflow halves it, many steps without one double it, and a resume keeps both."""

from kdtrain.precision.loss_scale import GROW_AFTER, LARGEST, START, LossScale


def test_an_overflow_halves_it_and_many_steps_without_one_double_it():
    scale = LossScale(True)
    scale.update(overflowed=True)
    assert scale.value == START / 2
    for _ in range(GROW_AFTER):
        scale.update(overflowed=False)
    assert scale.value == START


def test_it_is_bounded_on_both_sides_and_warns_at_each_new_low():
    scale = LossScale(True)
    warnings = [scale.update(overflowed=True) for _ in range(30)]
    assert scale.value == 1.0 and not scale.absorbs(True)
    assert [text is not None for text in warnings] == [False] * 8 + [True] * 8 + [False] * 14
    assert "lower --lr" in str(warnings[8])
    for _ in range(GROW_AFTER * 30):
        scale.update(overflowed=False)
    assert scale.value == LARGEST


def test_a_non_finite_loss_does_not_change_it():
    assert LossScale(True).absorbs(True) and not LossScale(True).absorbs(False)


def test_outside_of_fp16_there_is_none():
    scale = LossScale(False)
    assert scale.update(overflowed=True) is None and scale.value == 1.0 and not scale.absorbs(True)
    scale.load_state_dict({"value": 8.0, "good": 3, "warned_at": 4.0})
    assert scale.value == 1.0


def test_a_scale_resumes():
    scale, resumed = LossScale(True), LossScale(True)
    for overflowed in (True, False, False, True, False):
        scale.update(overflowed=overflowed)
    resumed.load_state_dict(scale.state_dict())
    assert resumed.state_dict() == scale.state_dict() and resumed.value == START / 4
