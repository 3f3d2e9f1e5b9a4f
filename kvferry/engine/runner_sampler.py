"""Chooses tokens from logits so that the choice does not depend on batch, rank or engine."""

import hashlib

import torch

from kvferry.engine.messages import SamplingParams

#: Below this the largest logit wins every draw, and dividing by it could overflow.
_GREEDY_TEMPERATURE = 1e-5


def best_two_gaps(logits_SV: torch.Tensor) -> list[float]:
    """Difference of the two largest logits of each row."""
    best = logits_SV.topk(min(2, logits_SV.shape[-1]), dim=-1).values.double()
    return [float(row[0] - row[-1]) for row in best]


def sample(logits_V: torch.Tensor, params: SamplingParams, output_index: int) -> int:
    """Chooses one token.

    Args:
        logits_V: of one position, any float dtype.
        params: how to choose; with a seed the draw follows from ``(seed, output_index)`` and the
            logits alone.
        output_index: of the token in its answer, ``seed_offset`` included.
    """
    if params.temperature < _GREEDY_TEMPERATURE:
        return int(logits_V.argmax())
    scores = _top_p(_top_k(logits_V.double() / params.temperature, params.top_k), params.top_p)
    # A race: token t arrives after an exponential time with rate p(t), and the first wins. Each
    # token has its own random number, so logits that differ in the last bits, or one token more
    # or less inside top_p, almost never change the winner; walking along a cumulative sum would
    # shift every boundary.
    waits = torch.empty_like(scores).exponential_(generator=_generator(params.seed, output_index))
    return int((scores - waits.log()).argmax())


def _generator(seed: int | None, output_index: int) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    digest = hashlib.sha256(f"{seed} {output_index}".encode()).digest()
    return generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keeps the ``top_k`` best; ties with the last of them stay too."""
    if not 0 < top_k < len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the fewest best tokens whose probabilities add up to ``top_p``, at least one."""
    if top_p >= 1.0:
        return scores
    ordered, tokens = scores.softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    dropped = before >= top_p
    dropped[0] = False
    return scores.index_fill(0, tokens[dropped], float("-inf"))
