"""Manager and slow model agree after every step of random lives, over every kind of config."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.slow.configs import (
    chunk,
    cross,
    full,
    mla,
    only_state,
    setups,
    sink,
    state,
    uniform,
    window,
)
from tests.cache.slow.machine import machine_of

ANY = (full, window, chunk, state)

FAMILIES = {
    "full": setups((full,)),
    "mla, sinks": setups((mla, sink)),
    "window": setups((window,)),
    "chunk": setups((chunk,)),
    "state": setups((state, state, state, only_state)),
    "uniform": setups((uniform,)),
    "cross": setups((full,), (cross,)),
    "full and window": setups((full,), (window,), sizes=(1, 2, 4)),
    "two groups": setups(ANY, ANY),
    "three groups": setups(ANY, ANY, ANY, sizes=(1, 2, 4)),
    "context parallel": setups((full, mla), ANY, sizes=(1, 2), shards=(1, 2)),
}

QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("family", FAMILIES)
def test_manager_agrees_with_the_model(family):
    run_state_machine_as_test(
        machine_of(FAMILIES[family]), settings=settings(QUICK, max_examples=15)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_manager_agrees_with_the_model_for_long(family):
    run_state_machine_as_test(
        machine_of(FAMILIES[family]),
        settings=settings(QUICK, max_examples=300, stateful_step_count=60),
    )
