"""Conversations over a reference cluster: what is computed, and when a turn's first token comes.

``python -m benchmarks.turns`` has the same conversations held with clusters of two prefill and two
decode engines of unequal shapes, in turn: ``plain`` ones lend nothing, ``lending`` ones lend
prefixes and tell what they have, ``assumed`` ones lend them too and tell nothing, so that their
router goes by what it sent. Every answer is compared with those of one undivided engine that
forgets nothing.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from benchmarks import report
from benchmarks.undivided import undivided
from benchmarks.vllm_servers.client import metrics, stream
from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig
from kvferry.engine.messages import SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig

CONVERSATIONS = 10
AT_A_TIME = 2
"""Conversations that are held side by side."""
TURNS = 8
USER_TOKENS = 96
"""That each turn brings."""
ANSWER_TOKENS = 24
MODEL = TinyConfig(
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    hidden_size=512,
    intermediate_size=1536,
    vocab_size=1024,
)
"""About a millisecond for each token of a prompt."""
DTYPE = "float64"
"""However the ranks divide the work, the tokens are the same."""
_ENGINES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "p0": ("prefill", {"block_size": 16, "layout": "NHD"}),
    "p1": ("prefill", {"block_size": 8, "layout": "HND"}),
    "d0": ("decode", {"block_size": 24, "layout": "NHD", "tp": 2}),
    "d1": ("decode", {"block_size": 16, "layout": "HND"}),
}
_CONTENDERS = ("plain", "lending", "assumed")
_PROMPT_TOKENS = "kvferry_engine_prompt_tokens_total"
Tokens: TypeAlias = tuple[int, ...]
Ask: TypeAlias = Callable[[int, Sequence[int]], tuple[float, Sequence[int]]]
"""Says a prompt in a conversation: seconds to the first token, and all tokens of the answer."""


class Turn(msgspec.Struct, frozen=True):
    """One turn of one conversation."""

    conversation: int
    turn: int
    """From 0."""
    first_token_s: float
    is_right: bool


class Conversations(msgspec.Struct, frozen=True, kw_only=True):
    """One time that all conversations were held."""

    contender: str
    turns: tuple[Turn, ...]
    prompt_tokens: dict[str, float]
    """Where the engines' KV of prompts came from → tokens."""


class TurnResults(report.Results, frozen=True, kw_only=True):
    """All that one call measured."""

    undivided_tokens: int
    """That one engine computes which forgets nothing."""
    runs: tuple[Conversations, ...]


class Script(msgspec.Struct, frozen=True):
    """What the clients say, and what they are to hear."""

    questions: tuple[tuple[Tokens, ...], ...]
    """Conversation → turn → tokens."""
    answers: tuple[tuple[Tokens, ...], ...]
    computed: int
    """Prompt tokens that one undivided engine computes which forgets nothing."""

    def prompt(self, conversation: int, turn: int) -> list[int]:
        """All that was said before, then the new question."""
        said = zip(self.questions[conversation][:turn], self.answers[conversation], strict=False)
        before = [token for question, answer in said for token in (*question, *answer)]
        return [*before, *self.questions[conversation][turn]]


def draw_questions(vocab_size: int) -> tuple[tuple[Tokens, ...], ...]:
    """What the clients say: conversation → turn → tokens."""
    chance = random.Random(7)

    def question() -> Tokens:
        return tuple(chance.randrange(3, vocab_size) for _ in range(USER_TOKENS))

    return tuple(tuple(question() for _ in range(TURNS)) for _ in range(CONVERSATIONS))


def answer_all(
    questions: Sequence[Sequence[Tokens]], answer: Callable[[list[int]], Sequence[int]]
) -> tuple[tuple[Tokens, ...], ...]:
    """What somebody answers who is asked one question after the other."""
    answers = []
    for conversation in questions:
        heard: list[Tokens] = []
        prompt: list[int] = []
        for question in conversation:
            prompt += question
            heard.append(tuple(answer(prompt)))
            prompt += heard[-1]
        answers.append(tuple(heard))
    return tuple(answers)


def write_script(model_folder: Path) -> Script:
    """Draws the questions, and has one engine of one rank answer them."""
    questions = draw_questions(MODEL.vocab_size)
    needed = CONVERSATIONS * TURNS * (USER_TOKENS + ANSWER_TOKENS) // 16
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    computed = 0
    with undivided(model_folder, DTYPE, num_blocks=2 * needed) as engine:

        def answer(prompt: list[int]) -> Sequence[int]:
            nonlocal computed
            (output,) = engine.generate([prompt], sampling)
            computed += len(prompt) - output.num_cached_tokens
            return output.token_ids

        answers = answer_all(questions, answer)
    return Script(questions, answers, computed)


def cluster_config(model_folder: Path, contender: str) -> ClusterConfig:
    """Two engines of each role."""
    lends = contender != "plain"
    engines: dict[str, list[dict[str, object]]] = {"prefill": [], "decode": []}
    for name, (role, shape) in _ENGINES.items():
        kv_role = "kv_both" if lends else {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        transfer = {
            "kv_connector": "PullConnector",
            "kv_role": kv_role,
            "kv_port": 0,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"transport": "shm"},
        }
        engine = {"name": name, "num_blocks": 1200, "max_model_len": 2048, **shape}
        if contender == "lending":
            places = ("endpoint", "replay_endpoint")
            engine["kv_events"] = dict.fromkeys(places, "tcp://127.0.0.1:0")
        engines[role].append({**engine, "kv_transfer_config": transfer})
    return ClusterConfig.from_mapping(
        {
            "model": {"source": str(model_folder), "dtype": DTYPE},
            "router": {"port": 0, "assume_cached": contender == "assumed"},
            **engines,
        }
    )


def ask_router(url: str, model: str = "model") -> Ask:
    """Asks whom an OpenAI server's router chooses."""

    def ask(_conversation: int, prompt: Sequence[int]) -> tuple[float, Sequence[int]]:
        began = time.perf_counter()
        first, tokens = stream(url, prompt, ANSWER_TOKENS, model=model)
        return first - began, tokens

    return ask


def hold(
    contender: str, script: Script, ask: Ask, prompt_tokens: Callable[[], dict[str, float]]
) -> Conversations:
    """Has all conversations held, each as fast as it is answered. Conversations whose numbers are
    equal modulo :data:`AT_A_TIME` are held one after the other.
    """

    def converse(conversation: int) -> list[Turn]:
        found = []
        for turn, expected in enumerate(script.answers[conversation]):
            first, tokens = ask(conversation, script.prompt(conversation, turn))
            found.append(Turn(conversation, turn, first, tuple(tokens) == expected))
        return found

    def converse_all(first: int) -> list[Turn]:
        held = range(first, CONVERSATIONS, AT_A_TIME)
        return [turn for conversation in held for turn in converse(conversation)]

    before = prompt_tokens()
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        held = list(clients.map(converse_all, range(AT_A_TIME)))
    after = prompt_tokens()
    return Conversations(
        contender=contender,
        turns=tuple(turn for each in held for turn in each),
        prompt_tokens={source: after[source] - before[source] for source in after},
    )


def _prompt_tokens(cluster: Cluster) -> dict[str, float]:
    """Of all engines: where the KV of prompts came from → tokens."""
    found = [metrics(engine.url) for engine in cluster.engines]
    return {
        source: sum(each.get(f'{_PROMPT_TOKENS}{{source="{source}"}}', 0.0) for each in found)
        for source in ("cache", "peer", "computed")
    }


def main(rounds: report.Rounds = 3, out: report.Out = report.RESULTS) -> None:
    """Compares clusters that lend prefixes with one that does not, over whole conversations."""
    run = report.Run("benchmarks.turns", out, rounds=rounds)
    runs: list[Conversations] = []
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        os.environ["KVFERRY_CACHE"] = str(Path(folder) / "cache")
        model_folder = prepare_model("tiny", tiny=MODEL)
        run.say("an undivided engine answers")
        script = write_script(model_folder)
        for number in range(rounds):
            for contender in _CONTENDERS:
                run.say(f"round {number + 1} of {rounds}: {contender}")
                with Cluster.open(cluster_config(model_folder, contender)) as cluster:
                    tokens = partial(_prompt_tokens, cluster)
                    ask = ask_router(cluster.url, str(model_folder))
                    runs.append(hold(contender, script, ask, tokens))
                run.say(summary(runs[-1], script.computed))
    results = run.results(TurnResults, undivided_tokens=script.computed, runs=tuple(runs))
    run.publish("turns", results, page)


def summary(run: Conversations, undivided: int) -> str:
    """One line."""
    wrong = sum(not turn.is_right for turn in run.turns)
    return (
        f"  {run.prompt_tokens} (undivided: {undivided} computed), {wrong} wrong, first token of "
        f"turn {TURNS}: {1e3 * _first_token_s([run], TURNS - 1):.0f} ms"
    )


def _first_token_s(runs: Sequence[Conversations], turn: int) -> float:
    return statistics.median(
        each.first_token_s for run in runs for each in run.turns if each.turn == turn
    )


def page(
    results: TurnResults,
    title: str = "Conversations",
    about: str = "Two prefill and two decode engines of unequal shapes, reference engine",
) -> str:
    """The page for people."""

    def of(name: str) -> list[Conversations]:
        return [run for run in results.runs if run.contender == name]

    names = list(dict.fromkeys(run.contender for run in results.runs))
    rows = [
        (
            f"turn {turn + 1}",
            *(f"{1e3 * _first_token_s(of(name), turn):.0f}" for name in names),
            *(
                f"{_first_token_s(of('plain'), turn) / _first_token_s(of(name), turn):.2f}"
                for name in names[1:]
            ),
        )
        for turn in range(TURNS)
    ]
    header = ("median ms to the first token", *names, *(f"plain / {name}" for name in names[1:]))
    notes = []
    for name in names:
        computed = [run.prompt_tokens.get("computed", 0.0) for run in of(name)]
        share = statistics.median(computed) / results.undivided_tokens
        wrong = sum(not turn.is_right for run in of(name) for turn in run.turns)
        asked = sum(len(run.turns) for run in of(name))
        notes.append(
            f"- {name}: {statistics.median(computed):,.0f} prompt tokens computed, {share:.2f} "
            f"times as many as one undivided engine that forgets nothing "
            f"({results.undivided_tokens:,}); {wrong} of {asked} answers wrong."
        )
    return report.page(
        title,
        results,
        f"{CONVERSATIONS} conversations of {TURNS} turns, {AT_A_TIME} at a time; each turn brings "
        f"{USER_TOKENS} tokens and is answered with {ANSWER_TOKENS}. {about}.",
        [*report.table((header, *rows)), "", *notes],
    )


if __name__ == "__main__":
    report.start(main)
