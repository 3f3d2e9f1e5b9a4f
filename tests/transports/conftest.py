"""What the transport tests share."""

import pytest

pytest.register_assert_rewrite("kvferry.testing.transport_conformance")
