"""What surrounds a run: launching, checks before it, signals, the watchdog, locks and exit codes."""
