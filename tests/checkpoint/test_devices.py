"""Saving from any device: the checkpoint holds the state at the call."""

import pytest
import torch
from checkpoint_kit import STATES, assert_equal, tensors

from kdtrain.checkpoint.saver import Saver
from kdtrain.checkpoint.store import Store, load

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_a_save_holds_the_state_at_the_call_although_the_device_continues_at_once(tmp_path, device, asynchronous):
    own = {name: each.to(device) for name, each in tensors(7).items()}
    own["large"] = torch.zeros(512, 512, device=device)
    saver = Saver(Store(tmp_path), asynchronous)
    for number in range(3):
        own["large"].fill_(number)
        expected = {name: each.cpu().clone() for name, each in own.items()}
        saver.save([f"step-{number:08d}"], number, own, STATES)
        saver.copies.before_change()
        for _ in range(20):
            own["large"] += own["large"] @ own["large"] + 1
        saver.wait()
        assert_equal(load(saver.store.path(f"step-{number:08d}")).tensors, expected)
    saver.close()
