"""Does an arm help? Runs paired by seed, a table of their scores, statistics on it, and the files that tell them.

``spec`` (a base config and arms) → ``runner`` (makes the runs in ``worker`` processes) → ``collect`` (checks them, reads them back) →
``table`` (rows of runs, from anywhere) → ``result`` (``statistics`` and ``curves`` of it) → ``output`` and ``report`` (with ``figures``).
"""
