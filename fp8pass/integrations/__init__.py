"""Integrations with other packages, each imported only on request.

accelerate.py           `dynamo_backend="fp8pass"` of accelerate and the Trainers on top of it
torchtitan.py           `--compile.backend fp8pass` for models with FlexAttention
compressed_tensors.py   `export`: FP8 weights for vLLM and transformers
"""
