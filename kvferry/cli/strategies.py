"""The strategies of a pair of engines: what each would take over each transport."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvferry.cli.console import seconds_text
from kvferry.explain.costs import PlanWork, transfer_work
from kvferry.explain.pairs import GroupChoice, PlannedEngine
from kvferry.explain.savings import TRIAL_RANKS
from kvferry.topology.layer_ranges import ranges_text
from kvferry.topology.machine_costs import MachineCosts, load_costs
from kvferry.topology.strategies import (
    Addressing,
    MoverTraits,
    Strategy,
    choose_strategy,
)

#: What is known of the transports that ship, without loading what they stand on.
KNOWN_MOVERS = {
    mover.name: mover
    for mover in (
        MoverTraits("shm", Addressing.BOTH, fences=True),
        MoverTraits("vm", Addressing.BOTH, fences=True),
        MoverTraits("cuda_ipc", Addressing.BOTH, fences=True),
        MoverTraits("tcp", Addressing.PACKED, fences=True),
        MoverTraits("ucx", Addressing.PACKED, fences=True),
        MoverTraits("nixl", Addressing.SEGMENTS, fences=False),
    )
}


@dataclass(frozen=True, slots=True)
class Movers:
    """The transports that are looked at, and the machine's constants."""

    movers: tuple[MoverTraits, ...]
    costs: MachineCosts

    @classmethod
    def wanted(cls, transport: str | None, costs: Path | None) -> "Movers":
        """One transport by its name, or all that are known.

        Raises:
            PluginError: a transport that is neither known nor installed.
            ConfigError: the file of costs cannot be used.
        """
        if transport is None:
            return cls(tuple(KNOWN_MOVERS.values()), load_costs(costs))
        return cls((_mover(transport),), load_costs(costs))


def _mover(name: str) -> MoverTraits:
    if name in KNOWN_MOVERS:
        return KNOWN_MOVERS[name]
    from kvferry.transports.registry import transport_class

    found = transport_class(name)
    return MoverTraits(name, found.addressing, found.fences)


def choose_for_pair(
    prefill: PlannedEngine, decode: PlannedEngine, num_tokens: int, movers: Movers
) -> dict[str, tuple[GroupChoice, ...]]:
    """Transport → how the decode rank that takes longest would read a request, group by group.

    Of larger engines a sample of the ranks is looked at.

    Raises:
        ValueError, ProtocolError, BoundsError: see :func:`kvferry.explain.explain_transfer`.
    """
    parts: dict[int, list[PlanWork]] = {}
    for part in transfer_work(
        source=prefill.groups,
        target=decode.groups,
        num_tokens=num_tokens,
        target_engine_id=decode.engine_id,
        source_memory=prefill.memory,
        target_memory=decode.memory,
        target_ranks=range(0, decode.world_size, -(-decode.world_size // TRIAL_RANKS)),
    ):
        parts.setdefault(part.target_rank, []).append(part)
    return {
        mover.name: max(
            (
                tuple(
                    GroupChoice(part.layers, choose_strategy(part.work, mover, movers.costs))
                    for part in of_rank
                )
                for of_rank in parts.values()
            ),
            key=_total_s,
        )
        for mover in movers.movers
        if parts
    }


def _total_s(groups: Sequence[GroupChoice]) -> float:
    return sum(group.choice.seconds for group in groups)


def show_strategies(choices: Mapping[str, Sequence[GroupChoice]], console: Console) -> None:
    """One transport in full, or a row per transport and pair of groups."""
    if len(choices) == 1:
        ((name, groups),) = choices.items()
        for group in groups:
            _show_one(name, group, len(groups) > 1, console)
        return
    table = Table(title="Strategies, and the time of the slowest decode rank", title_justify="left")
    for heading in ("transport", "layers", "chosen", *Strategy):
        table.add_column(str(heading))
    for name, groups in choices.items():
        for group in groups:
            choice = group.choice
            seconds = [_seconds_text(choice.cost_of(strategy).seconds) for strategy in Strategy]
            table.add_row(name, ranges_text(group.layers), choice.strategy, *seconds)
    if choices:
        console.print(table)


def _show_one(name: str, group: GroupChoice, is_one_of_several: bool, console: Console) -> None:
    layers = f" for layers {ranges_text(group.layers)}" * is_one_of_several
    table = Table(
        title=f"Strategies over {name}{layers}, and the time of the slowest decode rank",
        title_justify="left",
    )
    for heading in ("strategy", "time", "what it takes, or why not"):
        table.add_column(heading)
    for cost in group.choice.costs:
        mark = " (chosen)" if cost.strategy is group.choice.strategy else ""
        table.add_row(f"{cost.strategy}{mark}", _seconds_text(cost.seconds), cost.reason)
    console.print(table)


def _seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)
