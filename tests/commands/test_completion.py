"""`kdtrain completion`: what a shell offers, and that nothing heavy is imported for it."""

import shutil
import subprocess
import sys

import pytest

from kdtrain.cli import main
from kdtrain.commands import completion
from kdtrain.config.commands import COMMANDS
from kdtrain.config.registered import COMMANDS as EVERY


@pytest.fixture
def offered(tmp_path):
    """Ask what bash offers for the words of a line, of which the last is being typed."""
    script = tmp_path / "kdtrain.bash"
    script.write_text(completion.bash())

    def ask(*words):
        program = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kdtrain; echo "${COMPREPLY[@]}"'
        command = ["bash", "-c", program, "-", str(script), "kdtrain", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()

    return ask


def test_bash_offers_commands_options_and_values(offered):
    assert set(offered("")) == {*EVERY.help(), "--help", "--version"}
    assert offered("disti") == ["distill"]
    assert {"--temperature", "--temperature-mode"} <= set(offered("distill", "--temp"))
    assert offered("distill", "--student", "gpt") == ["gpt2-tiny"]
    assert offered("cache-teacher", "--teacher", "") == ["smollm2-135m", "stdlib-5m"]
    assert "mxfp8" in offered("distill", "--precision", "") and "reverse-kl" in offered("distill", "--divergence", "")
    assert offered("completion", "") == ["bash", "zsh", "fish"]
    assert offered("export", "") == offered("distill", "--cache", "") == [], "files, then"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_have_every_command_and_option(shell):
    script = completion.SCRIPTS[shell]()
    for command in COMMANDS:
        assert command in script
        assert all(name.removeprefix("--") in script for name in completion.flags(COMMANDS[command]))
    if found := shutil.which(shell):
        assert subprocess.run([found, "-n"], input=script, text=True, timeout=20).returncode == 0


def test_the_script_is_made_without_a_heavy_import():
    program = (
        "import sys; from kdtrain.cli import main\n"
        "try: main(['completion', 'bash'])\n"
        "finally: print(*{'torch', 'transformers', 'h5py', 'datasets'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    # made in a process of its own: other tests of this one register names
    program = "from kdtrain import cli; from kdtrain.commands import completion; print(completion.bash(), end='')"
    script = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, script, "") and "--student" in script


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["completion", "csh"])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
