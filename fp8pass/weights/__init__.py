"""Quantized weights of linear layers.

quantized_parameter.py  `QuantizedWeight`: a parameter in E4M3 with a scale for each row
quantization_kernel.py  the Triton kernel that quantizes weights by row
choice.py               which layers can have quantized weights
quantize_frozen.py      `quantize_frozen`: replaces frozen weights by FP8 data

FSDP2 gathers quantized weights by `distributed/weight_gather.py`; `optim/offload.py` keeps exact
weights in host memory and FP8 data on the device.
"""
