"""What entry points share: Hydra in, one-line errors and exit codes out."""
