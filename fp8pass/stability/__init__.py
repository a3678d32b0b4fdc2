"""Tools that watch training runs.

monitor/      `Monitor`: statistics of each quantized tensor, in sampled steps
guard/        `Guard`: detects that a run is about to fail, and intervenes on request
callbacks.py  callbacks for the trainers of Hugging Face and Lightning
"""
