"""Tools that watch a run of training.

monitor/  `Monitor`: statistics of each quantized tensor, in sampled steps
guard/    `Guard`: detects that a run is about to fail, and intervenes on request
"""
