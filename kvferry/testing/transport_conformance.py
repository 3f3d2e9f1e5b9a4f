"""The conformance class of transports: subclass it, name your transport, run pytest.

.. code-block:: python

    from kvferry.testing import TransportConformance
    from pigeons.transport import PigeonTransport

    class TestPigeonTransport(TransportConformance):
        transport = PigeonTransport
        extra = {"coop": "north"}  # keys of its ExtraConfig, if it needs any

Every test reads from a peer in a process of its own and compares the whole memory around the
target with a slow oracle. For a transport with ``fences = False`` there is
:class:`~kvferry.testing.unfenced_conformance.UnfencedTransportConformance`. The tests are in
:mod:`~kvferry.testing.reading_conformance` and :mod:`~kvferry.testing.ending_conformance`.
"""

from kvferry.testing.ending_conformance import EndingConformance
from kvferry.testing.reading_conformance import ReadingConformance


class TransportConformance(ReadingConformance, EndingConformance):
    """What every transport must do. See the module's docstring for how to use it."""
