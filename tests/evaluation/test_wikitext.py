"""WikiText's detokenizer and counts, on the published validation file and on difficult texts."""

import pytest

from lmscale.config.data import TokenizerConfig
from lmscale.config.zero_shot import WikiText103Config
from lmscale.data.tokenizer import load_published_tokenizer
from lmscale.evaluation.task import read_complete_file
from lmscale.evaluation.wikitext103 import WikiText103, count_words, detokenize


def test_the_validation_file_has_the_published_counts(shared_data) -> None:
    tokenizer = load_published_tokenizer(TokenizerConfig("gpt2", path=str(shared_data / "gpt2-bpe")), "gpt")
    path = str(shared_data / "wikitext" / "wikitext-103.wiki.valid.tokens")
    task = WikiText103.read(WikiText103Config("wikitext103", path), tokenizer)
    assert task.counts == {
        "T_o": 217_642,
        "T": 236_891,
        "windows": 7_372,
        "windows_megatron": 7_403,
        "window": 1024,
        "stride": 32,
    }
    assert task.split == "validation" and len(task.tokens) == 236_892


@pytest.mark.parametrize(
    "tokenized, written",
    [
        ("1 @,@ 000 @.@ 5 well @-@ known", "1,000.5 well-known"),
        ("he said : yes ; no , no . So ! Why ? Ah", "he said: yes; no, no. So! Why? Ah"),
        ("the dog 's and the dogs ' bones", "the dog's and the dogs' bones"),
        (
            'he said " hello there " to ( some [ one ] ) and { more }',
            'he said "hello there" to (some [one]) and {more}',
        ),
        (" \n = = = Life = = = \n \n He was born . \n", "\n=== Life ===\n\nHe was born.\n"),
        ("it is 20 ° C in N years", "it is 20°C in 1 years"),
        ('a " quote \n over lines " ends', 'a "quote\nover lines" ends'),
    ],
)
def test_artifacts_are_removed(tokenized: str, written: str) -> None:
    assert detokenize(tokenized) == written


def test_words_are_separated_by_single_spaces() -> None:
    assert count_words(" \n = Title = \n \n He  ran . \n") == len(["=", "Title", "=", "\n", "\n", "He", "", "ran", "."])


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "must be a file with text, but .* is empty"),
        (b" \n \n", "must be a file with text, but .* is empty"),
        (b"one\ntwo and a ha", "must end with a line end, but .*, line 2 is cut off"),
    ],
)
def test_a_file_that_would_change_the_counts_raises(tmp_path, data: bytes, message: str) -> None:
    path = tmp_path / "file.tokens"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"`task.path`.*{message}"):
        read_complete_file(path)
