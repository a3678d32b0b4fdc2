"""Messages to users about compilations: `log.py`."""
