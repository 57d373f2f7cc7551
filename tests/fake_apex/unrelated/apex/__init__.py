"""Stands for the web package that PyPI calls apex: it must not even be imported."""

raise RuntimeError("imported")
