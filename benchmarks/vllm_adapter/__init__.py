"""``python -m benchmarks.vllm_adapter``: what our connector costs a step of vLLM's engine.

``meter``    times every call that vLLM makes to a connector, by step
``engines``  a prefill and a decode engine in one process of ``.venv-vllm``, stepped by hand
``report``   table, JSON and Markdown
"""
