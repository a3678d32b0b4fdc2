"""Quantized weights of linear layers.

quantized_parameter.py  `CodedWeight`: a parameter in E4M3 with a scale for each row
quantization_kernel.py  the Triton kernel that quantizes weights by row
choice.py               which layers can have quantized weights
quantize_frozen.py             `quantize_frozen`: frozen weights are replaced by FP8 data

FSDP2 gathers quantized weights by `distributed/weights.py`; `optim/offload.py` keeps exact weights
on the host and FP8 data on the device.
"""
