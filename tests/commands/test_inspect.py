"""The output of `kdtrain inspect` for a cache."""

import json
from pathlib import Path

import pytest

from kdtrain.cache.codec import CodecSpec
from kdtrain.cache.manifest import read_manifest
from kdtrain.commands.inspect import _tail_rule, main
from kdtrain.config import InspectConfig
from kdtrain.monitor.tables import show

CACHE = Path(__file__).parents[1] / "golden" / "cache" / "sparse"


@pytest.fixture
def fidelity() -> dict:
    found = read_manifest(CACHE).fidelity
    assert found
    return found


def test_a_cache_is_shown_with_a_line_of_fidelity_for_each_temperature_and_tail_rule(
    capsys: pytest.CaptureFixture[str], fidelity: dict
) -> None:
    assert main(InspectConfig(path=CACHE)) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for temperature in ("T=1", "T=2", "T=4"):
        found = fidelity[temperature]
        assert f"fidelity, {temperature} KL(full || cache): {found['kl_bucket']:.2g}" in shown
        for rule, each in found["gradient"].items():
            assert f"{rule}: {each['token_angle']:.1f}° x {each['token_norm']:.3g}, mean" in shown
    assert f"{fidelity['sample']['tokens']:,} tokens of {fidelity['split']}" in shown
    assert "error of log Z at most" in shown
    assert "tail rule sampled by default, or --tail control-variate" in shown


def test_the_control_variate_is_offered_where_there_is_a_top_k():
    kinds = {"top_k": 8, "num_samples": 24}, {"num_samples": 50}, {"top_k": 12}
    offered = [_tail_rule(CodecSpec(kind="sparse", vocab_size=64, **kind)) for kind in kinds]
    assert offered == ["sampled by default, or --tail control-variate", "sampled", "ghost"]


def test_json_has_the_fidelity_as_the_manifest_has_it(capsys: pytest.CaptureFixture[str], fidelity: dict) -> None:
    assert main(InspectConfig(path=CACHE, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"] == fidelity


def test_untrusted_names_are_shown_without_control_characters_or_markup(capsys):
    show("verify t/[/b]", {"[/red]": ["[/b] \x1b[2J", "\ud800"], "[b]versions[/b]": "x"}, as_json=False)
    shown = capsys.readouterr().out
    for each in ("verify t/[/b]", "[/red]", "[/b] \\x1b[2J", "\\ud800", "[b]versions[/b]"):
        assert each in shown
    assert "\x1b[2J" not in shown and len(shown.splitlines()) == 6
