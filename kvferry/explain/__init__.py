"""What a plan costs, in words and pictures: behind ``kvferry plan`` and ``kvferry check``.

Nothing here moves a byte, and nothing here prints::

    explain_transfer   bytes and segments of a request, per two ranks    costs.py
    find_savings       which other shapes would cost less                savings.py
    explain_pair       both of them for two engines; as JSON             pairs.py
    difference_texts   what differs between two engines, in sentences    sentences.py
    draw_pairs         who reads what from whom, as SVG                  picture.py
    KNOWN_MODELS       shapes of models, also from a ``config.json``     models.py
    FAMILIES           how the files of each family are read             families.py
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
