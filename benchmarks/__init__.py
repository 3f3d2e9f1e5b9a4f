"""The benchmarks: ``make bench``, or ``python -m benchmarks``.

==================  ============================================================
module              what is in it
==================  ============================================================
``cases``           the cache that is moved, the cases, and the check of the data
``remote``          the processes that play source and reader
``kvferry_side``    our transports, and the memcpy they are measured against
``nixl_side``       NIXL, set up as well as we know how
``transports``      all of them, interleaved round by round
``binding``         how long ``bind`` takes
``confirm``         how long a confirm takes
``managers``        our KV cache manager beside vLLM's; ``peers`` has both
``postprocess``     the postprocessor beside three passes and one pass over the memory
``paged``           bursts of requests of random pages beside what each path carries in bulk
``loads``           short loads beside NIXL and an older commit
``faults``          what faults do to requests of clusters over hosts
``gpu``             tests and benchmarks that need a GPU, in one go
``figures``         medians, ratios, goals
``report``, ``plot``  table, JSON, Markdown and picture
``tables``          how the smaller benchmarks show and write theirs
==================  ============================================================
"""
