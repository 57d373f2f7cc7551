"""Stands for NVIDIA's apex in tests: the same interface, plain torch inside."""
