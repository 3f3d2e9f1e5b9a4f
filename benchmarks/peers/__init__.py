"""vLLM's KV cache manager beside ours: same setups, same workloads, each in its own environment.

===================  ===========================================================
module               what is in it
===================  ===========================================================
``setups``           a KV cache in words that both understand
``peer``             what a manager under test can do
``kvferry_peer``     ours
``vllm_peer``        vLLM's; imports only in ``.venv-vllm``
``speed``            timed operations
``process``          a manager in a process of the environment that has it
===================  ===========================================================
"""
