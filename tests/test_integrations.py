"""The code of docs/integrations.md runs as it stands; that of a library which is not installed is left out."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
BLOCKS = dict(re.findall(r"^## (\S+)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
NEEDS = {"TRL": "trl", "peft": "peft", "Lightning": "lightning"}
INSTALLED = [name for name in BLOCKS if importlib.util.find_spec(NEEDS.get(name, "accelerate"))]


def test_the_page_has_code_for_each_library():
    assert list(BLOCKS) == re.findall(r"^## (\S+)$", PAGE, re.MULTILINE)
    assert list(BLOCKS) == ["transformers.Trainer", "TRL", "peft", "accelerate", "Lightning"]


@pytest.mark.parametrize("library", INSTALLED)
def test_the_code_for_a_library_trains_a_student_that_transformers_loads(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(ROOT / "tests" / "golden" / "cache" / "sparse", tmp_path / "cache" / "t")
    write_model_folder(tmp_path / "path" / "to" / "model", tiny_model("llama", 300, seed=3), tiny_tokenizer(300))
    names: dict = {}
    exec(compile(BLOCKS[library], "docs/integrations.md", "exec"), names)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("path/to/model", "my-student"))
    changed = [not torch.equal(old, new) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert any(changed) and names["student"].model.fused
    if library == "peft":
        loaded = AutoModelForCausalLM.from_pretrained("my-adapters")
        tokens = torch.arange(8)[None]
        torch.testing.assert_close(loaded(tokens).logits, after(tokens).logits, rtol=1e-4, atol=1e-5)
    else:
        own = names["student"].model.model
        assert all(torch.equal(one, other) for one, other in zip(own.parameters(), after.parameters(), strict=True))
