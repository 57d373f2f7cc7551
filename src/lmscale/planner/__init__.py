"""What a model costs, by arithmetic alone: parameters, FLOPs and bytes. No torch, so that asking takes no time."""
