"""The chaos suite: a folder under torment, and the truth about what was saved into it.

``models`` are the states that are trained, ``trainer`` and ``reader`` the processes, ``ledger`` the lines they write
about what they do, ``judge`` what follows from these lines, ``script`` the order of actions that a seed gives, and
``world`` carries them out.
"""
