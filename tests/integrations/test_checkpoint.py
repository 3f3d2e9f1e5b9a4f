"""What two checkpoints are told apart by when their files are missing, unread or unreadable."""

import pytest

from kvferry.errors import ConfigError
from kvferry.integrations import checkpoint
from tests.integrations.checkpoints import write_checkpoint


@pytest.mark.parametrize(("check", "warnings"), [("sample", 1), ("full", 1), ("config", 0)])
def test_without_files_a_checkpoint_is_its_name_and_revision(monkeypatch, caplog, check, warnings):
    monkeypatch.setattr(checkpoint, "downloaded", lambda name, revision: None)
    found = checkpoint.checkpoint_digests("models/a", None, check)
    assert found == {"model": "models/a", "revision": "None"}
    assert caplog.text.count("the files of models/a are not on this machine") == warnings


def test_the_check_of_the_config_reads_no_file(tmp_path):
    folder = str(write_checkpoint(tmp_path, "llama"))
    found = checkpoint.checkpoint_digests(folder, "main", "config")
    assert found == {"model": folder, "revision": "main"}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    folder = write_checkpoint(tmp_path, "llama")
    assert checkpoint.checkpoint_digests(str(folder), None, "full").keys() == {"model.norm.weight"}
    (folder / "other.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"weights_check: .* cannot be read: .*other"):
        checkpoint.checkpoint_digests(str(folder), None, "sample")
