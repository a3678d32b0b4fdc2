"""Integrations with other packages. Each module is imported only on request.

accelerate.py   `dynamo_backend="fp8pass"` for accelerate and the Trainers that use it
peft.py         `prepare_experts`: PEFT's adapters of expert weights in compiled models
torchtitan.py   `--compile.backend fp8pass` for models with FlexAttention
serving.py      `export`, `served_weights`: FP8 weights for vLLM and transformers
"""
