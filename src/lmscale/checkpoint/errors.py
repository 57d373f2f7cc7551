"""Errors of checkpoints that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, malicious, unfinished or not ours; the message is one line and names it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # names in a forged file may contain line ends


class CheckpointVersionError(CheckpointError):
    """A checkpoint has a different format version; it is not damaged and is never renamed."""
