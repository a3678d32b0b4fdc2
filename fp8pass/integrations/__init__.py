"""Integrations with other packages. Each module is imported only on request.

accelerate.py           `dynamo_backend="fp8pass"` for accelerate and the Trainers that use it
torchtitan.py           `--compile.backend fp8pass` for models with FlexAttention
compressed_tensors.py   `export`: FP8 weights for vLLM and transformers
"""
