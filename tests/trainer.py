"""A trainer that changes the weights of engines under load, and clients that note what they got."""

import itertools
import random
import time
from collections.abc import Callable, Sequence

import httpx

from benchmarks.faults.load import Clients
from benchmarks.vllm_servers.client import RefusalError
from kvferry.testing.waiting import WAIT_S, until

CLIENTS = 4
NUM_PROMPTS = 12
PAUSED = "Generation is paused"
"""Text of the 503 with which vLLM 0.33 and later refuse requests between a pause and its end."""


def draw_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Prompts that come again after each change: cached KV of older weights would show."""
    draw = random.Random(5)
    lengths = [draw.randrange(3, longest) for _ in range(NUM_PROMPTS)]
    return [[draw.randrange(8, vocab_size) for _ in range(length)] for length in lengths]


def post(url: str, **options: object) -> None:
    """Sends a request that an engine answers when it is done.

    Raises:
        AssertionError: the engine refuses.
    """
    answer = httpx.post(url, timeout=WAIT_S, trust_env=False, **options)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text


class Day(Clients):
    """Clients that ask until the block ends, while the weights change.

    Weights have numbers, and change in their order. An answer is right if it is that of one weight
    that the engines may have had between its request and its end. While no change was under way,
    there is one such weight.
    """

    def __init__(self, ask: Callable[[Sequence[int]], list[int]], prompts: list[list[int]]) -> None:
        self.answers: list[tuple[int, range, list[int]]] = []
        """Prompt, weights that the engines may have had, tokens."""
        self.errors: list[str] = []
        self._begun = self._ended = 0
        """Changes so far."""
        self._ask = ask
        self._prompts = prompts
        self._numbers = itertools.count()
        super().__init__(CLIENTS)

    def turn(self) -> None:
        """See :meth:`Clients.turn`."""
        number = next(self._numbers) % len(self._prompts)
        oldest = self._ended
        try:
            tokens = self._ask(self._prompts[number])
        except (AssertionError, OSError, httpx.HTTPError, RefusalError) as error:
            if isinstance(error, RefusalError) and PAUSED in str(error):
                time.sleep(0.05)  # another turn asks again
                return
            self.errors.append(f"prompt {number}: {error!r}")
            return
        self.answers.append((number, range(oldest, self._begun + 1), tokens))

    def change(self, how: Callable[[int], None]) -> None:
        """Changes to the next weights, as soon as the present weights have answered some requests.

        Raises:
            AssertionError: no answer comes, or errors do.
        """
        enough = len(self.answers) + 2 * CLIENTS
        until(lambda: self.errors or len(self.answers) >= enough)
        assert self.errors == []
        self._begun += 1
        how(self._begun)
        self._ended += 1

    def wrong(self, expected: Sequence[Sequence[list[int]]]) -> list[tuple[int, range, list[int]]]:
        """The wrong answers.

        Args:
            expected: the answers of each weight to all prompts; they come again in this order.
        """
        return [
            (number, weights, tokens)
            for number, weights, tokens in self.answers
            if tokens not in [expected[each % len(expected)][number] for each in weights]
        ]

    def certain(self) -> set[int]:
        """Weights with an answer for which no other weights came into question."""
        return {weights[0] for _, weights, _ in self.answers if len(weights) == 1}
