"""What every entry point shares: Hydra in, one-line errors and exit codes out."""
