"""What the backend needs of SGLang is there, and another release is refused or tried by name."""

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import sglang

from kvferry.integrations import contract
from kvferry.integrations.sglang import NAME, activate, attach_sender, needed


def test_all_names_are_there():
    assert contract.gone(needed.NEEDED) == []
    needed.check_release(sglang.__version__)


@pytest.mark.parametrize("version", ["0.4.10", "0.5.22.post1", "dev"])
def test_an_older_release_is_refused(version):
    with pytest.raises(ImportError, match=r"is made for SGLang 0\.5\.23: install it"):
        needed.check_release(version)


def test_a_newer_release_with_every_name_is_tried_with_a_warning(caplog):
    needed.check_release("0.6.0")
    assert f"all {contract.num_needed(needed.NEEDED)} names" in caplog.text


def test_a_release_that_lacks_a_name_is_refused(monkeypatch):
    monkeypatch.setattr(needed, "NEEDED", {"sglang.srt.plugins:nothing": ()})
    with pytest.raises(ImportError, match=r"these are gone: sglang\.srt\.plugins:nothing"):
        needed.check_release("0.6.0")


def test_a_release_without_the_door_registers_nothing(monkeypatch, caplog):
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES

    before = list(DISAGG_TRANSFER_BACKEND_CHOICES)
    monkeypatch.setattr(sglang, "__version__", "0.5.1")
    activate()
    assert before == DISAGG_TRANSFER_BACKEND_CHOICES
    assert "SGLang 0.5.1 has no backend kvferry" in caplog.text


def test_sglang_knows_the_backend_and_its_own(activated):
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation import decode, prefill, utils

    assert NAME in DISAGG_TRANSFER_BACKEND_CHOICES
    assert prefill.TransferBackend is decode.TransferBackend is utils.TransferBackend
    ours = utils.TransferBackend(NAME)
    for kind in utils.KVClassType:
        found = prefill.get_kv_class(ours, kind)
        is_ours = found.__module__.startswith("kvferry.integrations.sglang")
        assert is_ours == (kind is not utils.KVClassType.KVARGS)
    fake = prefill.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert fake.__name__ == "FakeKVSender"


def test_servers_with_another_backend_are_left_alone():
    class Queue:
        class transfer_backend:  # noqa: N801 (an attribute of SGLang's)
            value = "nixl"

    attach_sender(True, Queue, None)
