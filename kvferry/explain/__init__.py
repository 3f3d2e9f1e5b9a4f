"""Explains the cost of a plan in words and pictures, for ``kvferry plan`` and ``kvferry check``.

The code here moves no bytes and prints nothing::

    explain_transfer   bytes and segments of a request, per two ranks    costs.py
    find_savings       other shapes that would cost less                 savings.py
    explain_pair       both of them for two engines; as JSON             pairs.py
    difference_texts   differences between two engines, in sentences     sentences.py
    draw_pairs         reads between the ranks of two engines, as SVG    picture.py
    KNOWN_MODELS       shapes of models, also from a ``config.json``     models.py
    FAMILIES           rules for the files of each family                families.py
    ModelFile          the keys of a file, and which were understood     model_file.py
"""

from kvferry.explain.costs import Balance, PairCost, explain_transfer
from kvferry.explain.savings import Saving, SideChange, find_savings

__all__ = [
    "Balance",
    "PairCost",
    "Saving",
    "SideChange",
    "explain_transfer",
    "find_savings",
]
