"""``python -m benchmarks.faults``: what each fault does to the requests of a cluster over hosts.

``load``      clients that never pause, and what is made of their answers
``system``    a cluster on hosts: engines, links, a router, and how each is hurt and mended
``reference`` kvferry's own engines as such a system
``vllm``      vLLM's servers as such a system, with our connector or NixlConnector
``faults``    the faults, a row each
``hostile``   requests that lie about KV
``matrix``    runs one fault at one step under load: a cell
``report``    table, JSON, Markdown and picture
"""
