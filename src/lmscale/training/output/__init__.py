"""What a run writes: its folder, metrics, checkpoints, traces."""
