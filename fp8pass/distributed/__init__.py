"""More than one GPU.

stages.py   formats for the stages of a pipeline
"""
