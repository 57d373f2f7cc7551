"""TensorBoard events: one a reported step, with all of its figures."""

from collections.abc import Mapping

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary


class StepEvents(TensorBoardLogger):
    """Lightning's TensorBoard logger, which writes an event for each figure, with one event for all of a step: half a
    millisecond less a step."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Figures by name, of one step."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.experiment._get_file_writer().add_summary(Summary(value=values), step)
