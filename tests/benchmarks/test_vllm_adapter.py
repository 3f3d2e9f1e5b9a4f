"""The benchmark of the adapter's steps charges each call once, and says which goals were missed."""

from benchmarks.machine import describe_machine
from benchmarks.vllm_adapter.engines import Case, Measured, Order
from benchmarks.vllm_adapter.meter import Meter, StepCost
from benchmarks.vllm_adapter.report import (
    OFF,
    ON,
    AdapterResults,
    joined,
    markdown,
    median_us,
    missed,
)


class Connector:
    def update(self):
        self.wait_for_save()

    def wait_for_save(self):
        pass

    def save_kv_layer(self):
        pass


def case(microseconds, in_flight=0):
    step = StepCost(scheduler=microseconds, worker=15.0, calls=10, empty=0.5)
    return Case(name="a case", in_flight=in_flight, steps={"wall": (step,), "cpu": (step,)})


def results_of(*cases, quick=False):
    measured = Measured(layer_calls=1.0, cases=cases, per_request={"update": (1.0, 3.0)})
    return AdapterResults(
        command="python -m benchmarks.vllm_adapter",
        machine=describe_machine(),
        load_after=1.0,
        quick=quick,
        order=Order(model="m", vocab_size=8, layers=2, requests=4, prompt_tokens=16, steps=1),
        runs=1,
        measured={OFF: measured, ON: measured},
        num_spans=8,
    )


def test_a_call_within_a_call_and_calls_for_layers_are_not_counted():
    meter, connector = Meter(), Connector()
    meter.watch(connector, "worker")

    def step():
        connector.update()
        connector.save_kv_layer()
        connector.wait_for_save()

    assert meter.step(step, "wall").calls == 2
    assert meter.step(lambda: None, "cpu").calls == 0


def test_what_an_empty_method_takes_is_subtracted_for_each_call():
    assert median_us(case(10.0), "cpu") == 20.0


def test_an_idle_step_may_cost_less_than_a_busy_one():
    assert missed(results_of(case(10.0), case(100.0, in_flight=64))) == []
    too_long = missed(results_of(case(11.0), case(191.0, in_flight=64)))
    assert [line.partition(":")[0] for line in too_long] == [
        "a case, tracing off",
        "a case, tracing off",
        "a case, tracing on",
        "a case, tracing on",
    ]
    assert "**missed**" in markdown(results_of(case(11.0)))
    assert missed(results_of(case(11.0), quick=True)) == []


def test_runs_are_put_together_case_by_case():
    runs = [results_of(case(ten), case(ten + 100.0)).measured[OFF] for ten in (10.0, 20.0, 60.0)]
    whole = joined(runs)
    assert [median_us(one, "wall") for one in whole.cases] == [30.0, 130.0]
    assert whole.per_request == {"update": (1.0, 3.0) * 3}
