"""Arithmetic on the layers of a model: which of them a group has, and on which stage they lie."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from kvferry.topology.parallel import check_count


def default_split(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage where nobody says otherwise.

    >>> default_split(10, pp=4)
    (2, 3, 3, 2)

    Raises:
        ValueError: there are more stages than layers.
    """
    if pp > num_layers:
        raise ValueError(f"parallel: pp={pp} stages for {num_layers} layers; lower pp")
    base, remainder = divmod(num_layers, pp)
    # The last stage also computes the logits, so it is the last to get one more.
    return tuple(base + (pp - 1 - remainder <= stage < pp - 1) for stage in range(pp))


def split_of_group(layer_indices: Sequence[int], stage_layers: Iterable[int]) -> tuple[int, ...]:
    """How many of a group's layers lie on each stage: the ``layer_split`` of its geometry.

    >>> split_of_group([2, 5, 6], stage_layers=[2, 3, 3])  # the stages hold 0-1, 2-4 and 5-7
    (0, 1, 2)

    Args:
        layer_indices: the group's layers, ascending, by their indices in the model.
        stage_layers: layers of the whole model per stage, first stage first.
    """
    edges = [bisect_left(layer_indices, edge) for edge in accumulate(stage_layers, initial=0)]
    return tuple(last - first for first, last in pairwise(edges))


def check_indices(num_layers: int, layer_indices: tuple[int, ...]) -> None:
    """Checks the indices of a group's layers.

    Raises:
        ValueError: they are not ``num_layers`` whole numbers, 0 or more and ascending.
    """
    if len(layer_indices) != num_layers:
        raise ValueError(
            f"layer_indices: {len(layer_indices)} indices for num_layers={num_layers}; give one "
            "per layer of the group"
        )
    for layer in layer_indices:
        if layer != 0 or isinstance(layer, bool):
            check_count("layer_indices", layer)
    for one, two in pairwise(layer_indices):
        if one >= two:
            raise ValueError(
                f"layer_indices: {two} follows {one}; name each layer once, in ascending order"
            )


def check_split(
    num_layers: int, layer_indices: tuple[int, ...] | None, split: tuple[int, ...] | None, pp: int
) -> None:
    """Checks how a group's layers are split over the stages.

    Raises:
        ValueError: the split does not fit; the message says what would.
    """
    if split is None:
        if layer_indices is not None and pp > 1:
            # The default splits the whole model, of which a group knows only its own layers.
            raise ValueError(
                f"layer_split: missing, with layer_indices and pp={pp}; say how many of these "
                "layers each stage holds, as split_of_group does"
            )
        default_split(num_layers, pp)
        return
    least = 1 if layer_indices is None else 0
    if len(split) != pp or sum(split) != num_layers or min(split) < least:
        raise ValueError(
            f"layer_split: {split} does not split {num_layers} layers over {pp} stages; give "
            f"each stage at least {least} layer{'s' * (least == 0)}, in sum all of them"
        )


def ranges_text(numbers: Iterable[int], most: int = 16) -> str:
    """Ascending numbers, neighbours joined.

    >>> ranges_text([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    >>> ranges_text([0, 1, 2, 5, 7, 8], most=1)
    '0-2 and 2 more ranges'

    Args:
        numbers: the numbers.
        most: ranges that are named; how many there are may be a peer's choice.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs[:most])
    return f"{text} and {len(runs) - most} more ranges" if len(runs) > most else text
