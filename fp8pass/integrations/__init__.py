"""What other packages need of fp8pass; nothing here is imported unless you ask for it.

accelerate.py           `dynamo_backend="fp8pass"` of accelerate and the Trainers on top of it
compressed_tensors.py   `export`: FP8 weights as vLLM and transformers load them
"""
