"""Two checkpoints of one shape have two fingerprints."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import torch
from safetensors.torch import save_file

from kvferry.integrations.vllm.fingerprint import digest_of_files

SHAPES = {"small": (3,), "large": (64, 300), "row": (1, 5000)}


def checkpoint(path, **changed):
    tensors = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }
    save_file(tensors | changed, path)
    return path


@pytest.mark.parametrize("full", [False, True])
def test_equal_bytes_have_one_digest(tmp_path, full):
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    assert digest_of_files([one], full=full) == digest_of_files([two], full=full)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_that_was_trained_on_changes_it(tmp_path, name, full):
    one = checkpoint(tmp_path / "one")
    two = checkpoint(tmp_path / "two", **{name: torch.randn(SHAPES[name])})
    assert digest_of_files([one], full=full) != digest_of_files([two], full=full)


def test_a_single_byte_between_the_samples_needs_the_full_check(tmp_path):
    path = tmp_path / "weights.bin"
    content = bytearray(4 << 20)
    path.write_bytes(content)
    before = [digest_of_files([path], full=full) for full in (False, True)]
    content[5000] = 1
    path.write_bytes(content)
    after = [digest_of_files([path], full=full) for full in (False, True)]
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"\x05" + b"\0" * 7 + b"[1,2]"])
def test_any_file_has_a_digest(tmp_path, content):
    path = tmp_path / "strange.safetensors"
    path.write_bytes(content)
    assert len(digest_of_files([path], full=False)) == 64
