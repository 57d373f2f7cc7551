"""The exit code of a run, decided equally on every rank."""

import lightning as L

from .exit_codes import DONE


class Ending:
    """The exit code of a run; a callback that stops the run sets it."""

    def __init__(self) -> None:
        self.exit_code = DONE

    def stop(self, trainer: L.Trainer, exit_code: int) -> None:
        """Stop the training after this step; Lightning's `should_stop` would validate once more."""
        self.exit_code = exit_code
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
