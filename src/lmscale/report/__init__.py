"""From records and the paper's numbers to tables and figures: the paper beside ours, the difference, the kind of evidence."""
