"""How the laws are shown to have teeth: a defect put in on purpose must break one."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

#: What a law says of memory that holds other bytes than the slow truth.
WRONG_BYTES = "not what the oracle wrote"
#: What a law says of bytes that are written twice, not at all, or outside of the span.
WRONG_COVER = "written as often as"


def assert_bytes(found, wanted) -> None:
    """Law 2: a storage holds what the oracle wrote into it."""
    np.testing.assert_array_equal(found, wanted, err_msg=f"memory is {WRONG_BYTES}")


def count_writes(segments, regions):
    """How often each byte of the target's regions is written: one count array per region.

    Args:
        segments: source rank → rows of segments, as ``copies.segments`` gives them.
        regions: the byte arrays that the segments point into.
    """
    writes = [np.zeros(len(region), dtype=np.int64) for region in regions]
    for rows in segments.values():
        for row in rows:
            first = int(row["target_offset"])
            writes[int(row["target_region"])][first : first + int(row["nbytes"])] += 1
    return writes


def assert_cover(counts, is_covered) -> None:
    """Law 1: how often each byte of a region is written; once within the span, else never."""
    np.testing.assert_array_equal(
        counts, is_covered.astype(np.int64), err_msg=f"bytes are not {WRONG_COVER} they should be"
    )


def must_be_caught(law, says, error=AssertionError, max_examples=400) -> None:
    """Runs a law over random cases until it fails in the way that answers the defect.

    A case in which the defect runs into some other error proves nothing and is passed over.

    Args:
        law: called with Hypothesis' data; it draws a case and judges it.
        says: what the message must contain, a pattern.
        error: an AssertionError for a wrong result, or the error that names the very mistake.
        max_examples: how many cases may be looked at.
    """

    # Finding that a defect is caught needs no small example.
    @settings(
        max_examples=max_examples,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def search(data):
        try:
            law(data)
        except HypothesisException:
            raise
        except Exception as found:
            if isinstance(found, error) and re.search(says, str(found)):
                raise

    with pytest.raises(error, match=says):
        search()
