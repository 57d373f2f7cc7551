"""Tables beside the paper's: its numbers as data, records of ours, and what differs. No torch."""
