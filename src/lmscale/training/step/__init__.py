"""One optimizer step: the Lightning module, the optimizer and its gradients, the schedule."""
