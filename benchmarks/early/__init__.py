"""Loads that begin while the prompt is computed, beside loads that begin when it is whole.

``python -m benchmarks.early`` runs the reference engines of ``cluster.py`` on hosts, with links
that a relay slows down; ``report.py`` writes the page.
"""
