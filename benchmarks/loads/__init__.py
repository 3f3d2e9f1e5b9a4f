"""Short loads: from ``start_load_kv`` to the result, as ``python -m benchmarks --only loads`` does.

``measure.py`` opens the contenders of ``engines.py`` and ``nixl_pair.py`` in the processes of
``process.py``; ``shared.py`` is what they have in common, ``report.py`` writes the page.
"""
