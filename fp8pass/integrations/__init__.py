"""What other packages need of fp8pass; nothing here is imported unless you ask for it.

accelerate.py           `dynamo_backend="fp8pass"` of accelerate and the Trainers on top of it
torchtitan.py           `--compile.backend fp8pass` for its models with FlexAttention
compressed_tensors.py   `export`: FP8 weights as vLLM and transformers load them
"""
