"""A record is a `run` of the paper only with its model, its steps, its file and its protocol."""

from dataclasses import replace

import pytest

from lmscale.config import TransformerConfig
from lmscale.config.zero_shot import LambadaConfig
from lmscale.evaluation.lambada import Lambada
from lmscale.evaluation.task import Task
from lmscale.evaluation.wikitext103 import WikiText103
from lmscale.paper import GPT_SIZES, STEPS

SMALL = TransformerConfig("gpt", 3, 24, 4, 301, 64)


def gpt(size: str) -> TransformerConfig:
    return TransformerConfig("gpt", *GPT_SIZES[size], 50_257, 1024)


WIKITEXT = WikiText103("wiki", "0", "test", 245_566, range(270_330), 1024, 32)
LAMBADA = Lambada("lambada", "0", "test", LambadaConfig("lambada", "file"), ())


@pytest.mark.parametrize("task", [WIKITEXT, LAMBADA, replace(LAMBADA, num_truncated=0)])
def test_the_papers_full_setting_is_a_run(task: Task) -> None:
    assert task.record_kind(gpt("2.5B"), STEPS) == ("run", "2.5B")
    assert task.record_kind(gpt("2.5B"), STEPS - 1) == ("scaled_down", "2.5B")
    assert task.record_kind(SMALL, STEPS) == ("scaled_down", None)
    assert task.record_kind(replace(gpt("2.5B"), parametrization="mup"), STEPS) == ("scaled_down", "2.5B")


@pytest.mark.parametrize(
    "task",
    [
        replace(WIKITEXT, split="validation"),
        replace(WIKITEXT, tokens=range(270_331)),  # another tokenizer
        replace(WIKITEXT, window=512),
        replace(WIKITEXT, stride=64),
        replace(LAMBADA, config=LambadaConfig("lambada", "file", "original")),
        replace(LAMBADA, split="other"),
        replace(LAMBADA, num_truncated=1),
    ],
)
def test_any_other_file_or_protocol_is_scaled_down(task: Task) -> None:
    assert task.record_kind(gpt("8.3B"), STEPS) == ("scaled_down", "8.3B")
