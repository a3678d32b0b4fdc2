"""Code that runs in and around compiled graphs: copies, kernel launches, CUDA graph support.

arena.py           pinned host memory, and pinned buffers that are reused in every step
copies.py          operators that copy between a GPU and host memory, and their bandwidth
triton_launcher.py repeated launches of one Triton kernel
cuda_graphs.py     weights with changing addresses (FSDP2), and gradients of several replays
"""
