"""What a validation costs: its forward passes, beside the training steps between two validations."""

from .training import TrainerConfig

FORWARD_PASSES_PER_STEP = 3  # in the time of a training step: a backward pass takes twice that of a forward pass


def steps_between(trainer: TrainerConfig) -> int:
    """Training steps from one validation to the next; a run is also validated at its start and its end."""
    return min(trainer.validate_every_steps or trainer.max_steps, trainer.max_steps)


def most_samples(trainer: TrainerConfig, global_batch_size: int) -> int:
    """Sequences that `max_validation_share` allows, at least 1."""
    work = FORWARD_PASSES_PER_STEP * global_batch_size * steps_between(trainer)
    return max(1, round(trainer.max_validation_share * work))


def describe_time(trainer: TrainerConfig, num_samples: int, global_batch_size: int) -> str:
    """Describe the time of a validation."""
    steps = steps_between(trainer)
    share = num_samples / (FORWARD_PASSES_PER_STEP * global_batch_size * steps)
    return f"{num_samples:,} sequences take {share:.1%} of the time of the {steps:,} training steps between validations"


def describe_excess(trainer: TrainerConfig, num_samples: int, global_batch_size: int) -> str:
    """Say in one line that a validation takes more than `max_validation_share`; empty if it does not."""
    most = most_samples(trainer, global_batch_size)
    if num_samples <= most:
        return ""
    return (
        f"`trainer.num_validation_samples` must be at most {most:,} with trainer.max_validation_share="
        f"{trainer.max_validation_share:g}, but {describe_time(trainer, num_samples, global_batch_size)}"
    )
