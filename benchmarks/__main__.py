"""``python -m benchmarks``: measures, prints, and writes the results."""

import enum
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks import managers, nixl_side, postprocess, prefixes, transport_page, transports
from benchmarks.remote import RemoteError, WrongDataError
from benchmarks.report import RESULTS, Out, Quick, Rounds, Run, start


class Part(enum.StrEnum):
    """What can be measured, in the order in which it is."""

    MANAGERS = "managers"
    POSTPROCESS = "postprocess"
    PREFIXES = "prefixes"
    TRANSPORTS = "transports"


def main(
    rounds: Rounds = 10,
    only: Annotated[list[Part] | None, typer.Option(help="Measure this alone; repeatable.")] = None,
    out: Out = RESULTS,
    quick: Quick = False,
    nixl: Annotated[bool, typer.Option(help="Whether NIXL takes part.")] = True,
) -> None:
    """Compares the transports with NIXL and memcpy, the cache manager with vLLM's, the
    postprocessor with the known three passes; counts the router's wrong guesses.
    """
    run = Run("benchmarks", out, rounds=2 if quick else rounds, quick=quick)
    skipped = nixl_side.why_missing() if nixl else "it was left out with --no-nixl"
    parts: dict[Part, tuple[Any, ...]] = {
        Part.MANAGERS: (managers.measure, managers.page),
        Part.POSTPROCESS: (postprocess.measure, postprocess.page),
        Part.PREFIXES: (prefixes.measure, prefixes.page),
        Part.TRANSPORTS: (
            partial(transports.measure, nixl_skipped=skipped),
            transport_page.page,
            transport_page.draw,
        ),
    }
    for part, (measure, *shown) in parts.items():
        if only and part not in only:
            continue
        try:
            results = measure(run)
        except WrongDataError as error:
            run.say(f"wrong data: {error}")
            raise typer.Exit(1) from error
        except RemoteError as error:
            if part is not Part.MANAGERS:
                raise
            run.say(f"cache managers are left out: {error}")  # vLLM's environment is not there
            continue
        run.publish(part, results, *shown)


if __name__ == "__main__":
    start(main)
