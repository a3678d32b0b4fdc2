"""Quantized weights of linear layers and experts.

quantized_parameter.py  `QuantizedWeight`: a parameter in E4M3 with scales for rows or blocks
quantization_kernel.py  the Triton kernel that quantizes weights by row
choice.py               chooses the layers that can have quantized weights
layout.py               how a checkpoint stores scales
fp8_checkpoint.py       uses the bytes of FP8 checkpoints as quantized weights
quantize_frozen.py      `quantize_frozen`: replaces frozen weights by FP8 data

Two other modules create quantized weights: `distributed/weight_gather.py`, so that FSDP2 gathers
FP8 data, and `optim/offload.py`, which moves the exact weights from the device to host memory.
"""
