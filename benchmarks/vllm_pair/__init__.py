"""``python -m benchmarks.vllm_pair``: kvferry and NIXL inside the same pair of vLLM servers.

``cases``    which prompts, and who takes part
``rounds``   what is measured
``report``   table, JSON, Markdown and picture
"""
