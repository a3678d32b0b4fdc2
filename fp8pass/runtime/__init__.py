"""Code that runs in and around compiled graphs: copies, kernel launches, CUDA graph support.

arena.py                 pinned host memory, and pinned buffers that are reused in every step
copies.py                operators that copy between a GPU and host memory during computation
bandwidth.py             measured bandwidth between host and device
triton_launcher.py       repeated launches of one Triton kernel
cuda_graph_inputs.py     weights whose address changes every step (FSDP2)
cuda_graph_gradients.py  gradients that accumulate over several replays of a CUDA graph
"""
