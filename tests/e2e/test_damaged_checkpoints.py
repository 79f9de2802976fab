"""The command without a valid checkpoint."""

import os
import shutil


def test_without_a_valid_checkpoint_latest_fails_and_auto_starts_from_the_beginning_and_deletes_nothing(
    bench, distilled
):
    shutil.copytree(bench.root / "run", bench.root / "ruined", symlinks=True)
    folder = bench.root / "ruined/checkpoints"
    sizes = {}
    names = ("step-00000000", "step-00000004", "epoch-0001", "step-00000008")
    assert {path.name for path in folder.iterdir() if not path.is_symlink()} == set(names)
    for name in names:
        os.truncate(folder / name / "state.json", 10)
        sizes[name] = {path.name: path.stat().st_size for path in (folder / name).iterdir()}

    argv = ("distill", "--cache", "cache", "--student", "student.toml", "--out", "ruined", "--steps", 8, "--lr", 1e-2)
    argv += ("--warmup-steps", 2, "--batch-size", 8, "--checkpoint-freq", 4, "--eval-freq", 4)
    argv += ("--no-compile", "--precision", "fp32", "--log-freq", 1)
    refused = bench.run(*argv, "--resume", "latest")
    assert refused.code == 1
    message = refused.refusal()
    assert all(f"{name} is damaged" in message for name in names)
    assert "state.json has 10 bytes instead of" in message
    assert not list(folder.glob("*.damaged-*"))

    restarted = bench.run(*argv).ok()
    assert "NO VALID CHECKPOINT in ruined/checkpoints: STARTING FROM THE BEGINNING" in restarted.stderr
    assert f"renamed the damaged ones {', '.join(names)}; nothing was deleted" in restarted.stderr
    for name, before in sizes.items():
        aside = folder / f"{name}.damaged-1"
        assert {path.name: path.stat().st_size for path in aside.iterdir()} == before
    assert bench.run("verify", "ruined").code == 0
    assert [line["step"] for line in bench.metrics("ruined")] == list(range(1, 9))
