"""Does an arm help? Runs paired by seed, a table of their scores, statistics on it, and the files that tell them.

``table`` (rows of runs, from anywhere) → ``result`` (``statistics`` and ``curves`` of it) → ``output`` and ``report``.
"""
