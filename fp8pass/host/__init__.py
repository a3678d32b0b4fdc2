"""The host's memory, and copies between it and a GPU that run beside everything else.

arena.py      memory of the host that a GPU copies from and to by itself
buffers.py    tensors in such memory, which is used again when they are gone
copies.py     the operators that copy: `to_host`, `from_host`, `settled`
bandwidth.py  bytes a second that cross the link, measured
"""
