"""Exit codes of the commands, for launchers.

0: finished (`finished.json`), or stopped and saved (`stopped.json`). 1: an unexpected error, start again.
"""

import os

MISTAKE = 2
"""The input is wrong."""
LOST = 3
"""Another process is lost. Start all again."""
LATE = 4
"""The process hung, or could not save in time. Start again."""
DIVERGED = 5
"""Non-finite gradients or parameters."""
TAKEN = 6
"""Another run has taken the run folder."""
UNSCORED = 7
"""Rewards or an environment failed for good: a server is dead, or a function raises."""
FINAL = (MISTAKE, DIVERGED, TAKEN, UNSCORED)
"""Codes that make a restart pointless."""
SIGNALLED = 128
"""Added to the number of a signal that ended a command unsaved, as in shells."""

leave = os._exit
"""End this process at once. `references.refuse_exits` replaces `os._exit` itself."""
