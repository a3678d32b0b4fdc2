"""Code that runs between and beside compiled graphs: copies, launches, CUDA graphs.

arena.py                 pinned memory of the host
buffers.py               tensors in pinned memory, which is reused after they are freed
copies.py                the operators `to_host`, `from_host` and `settled`
bandwidth.py             measured bytes per second between host and device
triton_launcher.py       repeated launches of one Triton kernel
cuda_graph_inputs.py     weights at a new address in each step, such as FSDP2's
cuda_graph_gradients.py  gradients that accumulate over replays
"""
