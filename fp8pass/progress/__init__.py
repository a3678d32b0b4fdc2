"""Messages about compilations, for users.

log.py        a line about each graph that trains, warnings, a spinner
gain.py       whether FP8 makes a model faster
"""
