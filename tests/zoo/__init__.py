"""Architectures from tiny configs, compiled with fp8pass and compared with eager PyTorch.

huggingface.py   those of transformers
modules.py       those of torch.nn: its modules, and blocks as timm and diffusion models have
stock.py         what stock PyTorch cannot compile
test_zoo.py      a sample in every run, all of them under `make test-long` and on a GPU
"""
