"""`kdtrain verify`: what is damaged is listed, and a sound cache is looked at without its teacher."""

import shutil


def test_a_damaged_cache_is_told_how_to_repair_it(workbench, made, tmp_path):
    shutil.copytree(made / "cache", tmp_path / "damaged")
    shard = next((tmp_path / "damaged" / "shards").glob("train-*.h5"))
    shard.write_bytes(shard.read_bytes()[:-7])
    code, out, _ = workbench.call("verify", tmp_path / "damaged")
    assert code == 1 and f"Next: kdtrain verify {tmp_path}/damaged --repair" in out.splitlines()


def test_without_a_teacher_a_cache_is_looked_at(workbench):
    found = workbench.json("verify", "cache")
    assert found["ok"] and found["look"]["rows"] > 0
    assert found["look"]["teacher_loss"] > 0 and found["look"]["entropy"] > 0
