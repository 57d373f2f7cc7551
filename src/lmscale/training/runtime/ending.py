"""How a run ends, decided on every rank alike."""

import lightning as L

from .exit_codes import DONE


class Ending:
    """The exit code of a run, which callbacks set as they stop it."""

    def __init__(self) -> None:
        self.exit_code = DONE

    def stop(self, trainer: L.Trainer, exit_code: int) -> None:
        """End the training after this step; Lightning's own `should_stop` would validate once more."""
        self.exit_code = exit_code
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
