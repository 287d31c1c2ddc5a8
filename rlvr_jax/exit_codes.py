"""Exit codes of the commands: what a launcher decides by. No jax in here.

0 is finished. Anything else that is not listed (a signal's 128 + n too) is a crash.
"""

MEND = 2
"""A person has to mend something (config, data, model): starting again would fail again. Also where a result was given that is not
whole: ``verify`` with lines that could not be used, ``compare`` with failed or refused runs, ``compare --report-only`` with missing ones."""
LOST = 69
"""EX_UNAVAILABLE: a step took longer than its limit, or another process or the network was lost. Start again: all
processes go on from the last checkpoint."""
STOPPED = 75
"""EX_TEMPFAIL: stopped by a signal or by ``train.max_seconds`` after saving. Start again: it goes on exactly there."""

AGAIN = (LOST, STOPPED)
