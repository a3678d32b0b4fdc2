"""Messages to users about compilations.

log.py        one line for each training graph, warnings, a spinner
stored.py     messages about cached graphs, in files
"""
