"""Stands for the compiled extension of NVIDIA's apex."""
