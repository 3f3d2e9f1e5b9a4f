"""Real vLLM servers on this machine's CPU, for the tests and for the benchmark beside NIXL.

``models``       small models that vLLM reads
``connectors``   what a server is told about its KV connector
``server``       one server: a process group with an HTTP port
``pair``         a prefill server and a decode server, and what a proxy in front of them does
``front``        a router or proxy in front of servers
``client``       requests and metrics over HTTP

The servers run in ``.venv-vllm``, or in the environment of an older release that the variable
``KVFERRY_TEST_VLLM`` names; ``make test-vllm`` sets them up. All else runs in ``.venv``.
"""
