"""The benchmarks: ``make bench``, or ``python -m benchmarks``.

===================  ===========================================================
module               what is in it
===================  ===========================================================
``report``           the run, the page, the JSON and the picture of every benchmark
``remote``           processes that hold one object each
``programs``         programs that serve HTTP
``undivided``        one engine alone, whose answers are right
``cases``            the cache that is moved, the cases, and the check of the data
``kvferry_side``     our transports, and the limits they are measured against
``nixl_side``        NIXL, set up as well as we know how
``transports``       all of them, interleaved round by round
``transport_page``   their ratios and goals, page and picture
``prefixes``         the router's prefix index
``managers``         our KV cache manager beside vLLM's; ``peers`` has both
``postprocess``      the postprocessor beside three passes and one pass over the memory
``scale``            the control plane with many engines
``router_cost``      what a router costs
``turns``            conversations over a reference cluster; ``vllm_turns`` over vLLM's servers
``early``            loads that begin while the prompt is computed
``faults``           what faults do to requests of clusters over hosts
``vllm_servers``     vLLM's servers on this machine, for tests, too
``vllm_pair``        kvferry and NIXL in the same pair of vLLM's servers
``vllm_shapes``      whose answers are right over unequal vLLM servers
``gpu``              tests and benchmarks that need a GPU, in one go
===================  ===========================================================
"""
