"""Cells and ranks: geometries say which rank holds which cells, and plans move cells between ranks.

The steps are describe, plan, bind and run::

    ParallelShape       how an engine's ranks share layers and heads  sharding.py
    GroupGeometry       the properties that all groups share          group.py
    EngineGeometry      which cells of attention each rank holds      geometry.py
    StateGeometry       which states each rank holds                  states.py
    memory_of           where cells lie in tensors of the host        memory.py
    locate_memory       where cells lie in tensors of any device      memory.py
    EngineDescription   the message that describes an engine          description.py
    pair_groups         which groups of two engines share layers      pairing.py
    plan_transfer       which rank gives which cells; once per peer   plan.py
    TransferPlan.lower  the cells of a plan as strided tiles          lowering.py
    TransferPlan.bind   the copies of a request                       binding.py
    run_copies          run them between tensors of this process      run.py
    token_digests       compare two engines' cells                    cell_digest.py
    KVTopology          ratios and ranks in the field's words         kv_topology.py
"""

from kvferry.topology.cell_digest import token_digests
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.group import GroupGeometry
from kvferry.topology.kv_topology import KVTopology
from kvferry.topology.lowering import Piece
from kvferry.topology.memory import locate_memory, memory_of
from kvferry.topology.pairing import GroupPair, group_mismatches, pair_groups
from kvferry.topology.plan import BoundCopies, TransferPlan, check_block_ids, plan_transfer
from kvferry.topology.run import run_copies
from kvferry.topology.sharding import (
    ParallelShape,
    RankCoordinates,
    default_split,
    ranges_text,
    split_of_group,
)
from kvferry.topology.states import (
    StateGeometry,
    gated_delta_net_states,
    mamba2_states,
    state_part,
)
from kvferry.topology.tensors import TensorPart

__all__ = [
    "BoundCopies",
    "EngineGeometry",
    "GroupGeometry",
    "GroupPair",
    "KVTopology",
    "ParallelShape",
    "Piece",
    "RankCoordinates",
    "StateGeometry",
    "TensorPart",
    "TransferPlan",
    "check_block_ids",
    "default_split",
    "gated_delta_net_states",
    "group_mismatches",
    "locate_memory",
    "mamba2_states",
    "memory_of",
    "pair_groups",
    "plan_transfer",
    "ranges_text",
    "run_copies",
    "split_of_group",
    "state_part",
    "token_digests",
]
