"""The types of configuration fields: what fits them, and how other values and empty paths are refused."""

import re
from dataclasses import is_dataclass
from importlib import import_module
from typing import Annotated, Literal

import pytest

from lmscale.config import checks
from lmscale.config.checks import AboveZero, Count, Fraction, PathText, Positive, Rule, Steps, check, in_words
from lmscale.config.convert import ConvertConfig
from lmscale.config.generate import GenerateConfig
from lmscale.config.model import Recompute
from lmscale.config.training import ResumeConfig

AUTO = Literal["auto"]


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (Positive, 0, "a whole number of at least 1, but is 0"),
        (Positive | None, 0, "a whole number of at least 1, but is 0"),  # null is no remedy
        (Positive | None, "many", "a whole number or null, but is 'many'"),
        (Positive, True, "a whole number, but is true"),
        (AUTO | Positive, -1, "auto or a whole number of at least 1, but is -1"),
        (bool | AUTO, 1, "true or false or auto, but is 1"),
        (Count, None, "a whole number, but is null"),
        (AboveZero, float("nan"), "a finite number, but is nan"),
        (AboveZero, 10**309, f"a finite number, but is {10**309}"),  # no float holds it
        (Annotated[Fraction, Rule("above 0", bool)], 0.0, "above 0, but is 0.0"),
        (Fraction, 1, "at least 0 and below 1, but is 1"),
        (Recompute | AUTO, "ful", "one of none, selective, full, auto, but is 'ful'; did you mean `full`?"),
        (Literal["torch"] | None, "x", "torch or null, but is 'x'"),
        (Steps, [1, 0], "a list of whole numbers of at least 1, but is [1, 0]"),
        (str | dict | None, 2024, """text or a group of keys or null, but is 2024; quotes make it text: 'key="..."'"""),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_rule_and_value(hint, value, message) -> None:
    with pytest.raises(ValueError) as caught:
        check(hint, value, "key")
    assert str(caught.value) == f"`key` must be {message}"


def test_every_alternative_of_a_type_fits_and_is_named() -> None:
    hint = AUTO | Positive | None
    for value in ("auto", 1, None):
        check(hint, value, "key")
    assert in_words(hint) == "auto or a whole number of at least 1 or null"
    check(AboveZero, 3, "key")
    check(Recompute, "full", "key")


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="`source` must be a path, but is ''"):
        ConvertConfig(source="", target="new")


@pytest.mark.parametrize("path", ["none", "auto"])
def test_weights_alone_must_be_those_of_a_checkpoint(path) -> None:
    with pytest.raises(ValueError, match=f"`path` must be a checkpoint where `weights_only`=true, but is '{path}'"):
        ResumeConfig(path, weights_only=True)


@pytest.mark.parametrize(
    "module", ["convert", "corpus", "data", "finetune", "generate", "plan", "teacher", "zero_shot"]
)
def test_every_path_has_the_type_that_refuses_an_empty_one(module) -> None:
    classes = filter(is_dataclass, vars(import_module(f"lmscale.config.{module}")).values())
    hints = [pair for each in classes for pair in checks.hints_of(each).items()]
    names = r"\w*path|ckpt|source|target|train|file|out|output|record|cache_dir"
    found = [(name, checks.kinds_of(hint)) for name, hint in hints if re.fullmatch(names, name)]
    assert found and all(PathText in kinds for _, kinds in found), found


def test_an_empty_prompt_is_a_prompt() -> None:
    assert GenerateConfig(ckpt="x", prompt="").prompt == ""
    with pytest.raises(ValueError, match="`prompt` must be given, or `file`"):
        GenerateConfig(ckpt="x", prompt="", file="prompts.txt")
