"""The shipped teacher behind a stand-in server (tests/stand_in.py)."""

import pytest
import torch

from kdtrain.models.loading import load_teacher
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.plugins.served import client
from tests.captures import capture, content, write_text
from tests.stand_in import standing_in


@pytest.fixture(scope="package")
def shipped():
    spec = ModelSpec.read("stdlib-5m", "teachers")
    return load_teacher(spec, "cpu").float(), load_tokenizer(spec)


@pytest.fixture(scope="package")
def another(shipped):
    """Make a teacher that differs a little from the shipped one."""
    model = load_teacher(ModelSpec.read("stdlib-5m", "teachers"), "cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.03 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="package")
def whole(shipped, tmp_path_factory):
    """Read the files of the undisturbed capture, by name."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch, standing_in(*shipped) as server:
        monkeypatch.chdir(folder)
        write_text(folder / "text.txt")
        capture(server, "whole")
    return content(str(folder / "whole"))


@pytest.fixture
def server(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(client, "_WRONG_WAIT", 0.1)
    write_text(tmp_path / "text.txt")
    with standing_in(*shipped) as server:
        yield server


@pytest.fixture
def plugin(server):
    server.plugin = True
    return server
