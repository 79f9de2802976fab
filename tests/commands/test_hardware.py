"""`kdtrain inspect --hardware`: a verdict and a reason for each format of few bits."""

from kdtrain.commands.inspect import hardware


def test_each_back_end_has_a_verdict_with_a_reason():
    table = hardware()
    rows = {name: text for name, text in table.items() if " by " in name}
    assert set(rows) == {
        "fp8 by torchao", "fp8 by transformer-engine", "fp8 by emulated", "mxfp8 by emulated", "mxfp4 by emulated",
    }  # fmt: skip
    assert all(text.split(":")[0] in ("real", "emulated", "no") for text in rows.values())
    assert rows["mxfp4 by emulated"].startswith("emulated: ")
