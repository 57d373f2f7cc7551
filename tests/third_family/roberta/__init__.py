"""A family outside the package: an encoder without token types, pooler and sentence order (Liu et al. 2019)."""
