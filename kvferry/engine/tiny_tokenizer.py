"""A tokenizer for the tiny random model: one token per byte, and the rest of the ids as words."""

from pathlib import Path

import msgspec

END_TOKEN = "<|end|>"  # noqa: S105 - a token of text, no secret

#: Closes no turn with a special token: the model is random and would never draw one on purpose.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes the tokenizer's files.

    Ids 0 to 255 are bytes, 256 is :data:`END_TOKEN`, the others are ``<257>`` and so on. A model
    with fewer ids gets no tokenizer.

    Args:
        folder: gets ``tokenizer.json`` and ``tokenizer_config.json``.
        vocab_size: ids of the model.
    """
    if vocab_size < 257:
        return
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    tokenizer.add_tokens([AddedToken(f"<{id}>") for id in range(257, vocab_size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    text = msgspec.json.format(msgspec.json.encode(config), indent=2)
    (folder / "tokenizer_config.json").write_bytes(text)


def _byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Bytes that print in Latin-1 stand for themselves; the others, in order, get the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
