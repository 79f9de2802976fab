"""What the manifests alone refuse is refused before torch is imported."""

import json
import subprocess
import sys

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "h5py"):
            raise ModuleNotFoundError("refused: " + name)
sys.meta_path.insert(0, Refuse())
from kdtrain import cli
for words in {words}:
    try:
        cli.main(words)
    except SystemExit as stop:
        assert stop.code == 2, stop.code
"""


def test_merge_subset_and_push_refuse_what_manifests_tell_before_torch_is_imported(made, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    cache, out = str(made / "cache"), str(tmp_path / "out")
    licences = [each for name in ("text", "teacher", "outputs") for each in (f"--license-{name}", "mit")]
    words = [
        ["merge", cache, cache, "--out", out],
        ["subset", cache, "--rows", "0:1000000", "--out", out],
        ["push", cache, "hf:org/name", *licences],
    ]
    code = WITHOUT_TORCH.replace("{words}", json.dumps(words))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert ["named twice" in each for each in said] == [True, False, False]
    assert "has the rows 0 to" in said[1] and "no token for the hub" in said[2] and not (tmp_path / "out").exists()
