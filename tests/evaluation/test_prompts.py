"""Prompts: reading, errors, and the display of generated text."""

import io
import json

import pytest
from sharding import small_config

from lmscale.data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer
from lmscale.evaluation.generation import Display, as_json
from lmscale.evaluation.prompts import Prompt, PromptReader, Row, read_prompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(["a small text, and a small text again: αβγ 漢字"] * 3, "gpt", 300, "vocab_size"))


def read_one(tokenizer: Tokenizer, text: str, max_new_tokens: int | None = 4, positions: int = 24) -> Prompt:
    config = small_config("gpt", vocab_size=tokenizer.vocab_size, max_position_embeddings=positions)
    return PromptReader(tokenizer, config, max_new_tokens).read(text, "line 3")


def test_an_empty_prompt_begins_a_document(tokenizer) -> None:
    assert read_one(tokenizer, "").ids == (tokenizer.id_of(END_OF_TEXT),)
    written_out = read_one(tokenizer, END_OF_TEXT, positions=64).ids
    assert len(written_out) > 1 and tokenizer.id_of(END_OF_TEXT) not in written_out


def test_new_tokens_may_fill_the_positions_and_no_more(tokenizer) -> None:
    text = "漢字漢字"
    length = len(tokenizer.encode_batch([text])[0])
    assert read_one(tokenizer, text, None).num_new == 24 - length
    assert read_one(tokenizer, text, 24 - length).num_new == 24 - length
    with pytest.raises(ValueError, match=rf"line 3: `max_new_tokens` must be at most {24 - length} \(.*, but is 24$"):
        read_one(tokenizer, text, 24)
    with pytest.raises(
        ValueError, match=rf"line 3: a prompt must be shorter than .* \({length}\), but is {length} tok"
    ):
        read_one(tokenizer, text, None, positions=length)
    with pytest.raises(ValueError, match="must be valid Unicode"):
        read_one(tokenizer, "a\udcffb")


def test_sample_numbers_continue_if_a_prompt_repeats(tokenizer) -> None:
    config = small_config("gpt", vocab_size=tokenizer.vocab_size, max_position_embeddings=24)
    reader = PromptReader(tokenizer, config, 4, num_samples=2)
    samples = [[row.sample for row in reader.rows(reader.read(text, "x"))] for text in ("a", "b", "a")]
    assert samples == [[0, 1], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("latin.txt", "good\ncaf\xe9\n".encode("latin-1"), "must be UTF-8, but .*latin.txt, line 2 has the byte 0xe9"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": 3}\n',
            'must have {"prompt": text} on each line, but a.jsonl, line 2',
        ),
        ("a.jsonl", b'{"prompt": "x"}\n\n', "must have JSON on each line, but a.jsonl, line 2"),
    ],
)
def test_a_bad_file_of_prompts_raises_with_its_line(tmp_path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def test_prompts_are_lines_or_json(tmp_path) -> None:
    lines = ["plain", "", "  spaces  ", "a\u2028b\x0cc", "null", "${x}", "\ufeffbom inside"]
    (tmp_path / "p.txt").write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    assert [text for _, text in read_prompts(tmp_path / "p.txt")] == lines
    texts = ["two\nlines", "", 'quotes " and \\ and =', "漢字"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": t, "id": 1}) + "\n" for t in texts))
    assert read_prompts(tmp_path / "p.jsonl") == [(f"p.jsonl, line {i + 1}", t) for i, t in enumerate(texts)]


class Terminal(io.StringIO):
    """Keeps what was written call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_streamed_text_consists_of_whole_characters(tokenizer) -> None:
    text = "naïve 漢字 👩‍👩‍👧 🏳️‍🌈 é́ end 👍🏽"
    ids = tokenizer.encode_batch([text])[0]
    assert len(ids) > len(text)  # characters of several tokens
    row, terminal = Row(Prompt("", "p", (0,), 99, 0), 0), Terminal()
    display = Display([row], tokenizer, terminal, heading=False, with_prompt=False)
    for token in ids:
        row.tokens.append(token)
        display.update()
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(terminal.writes)
    assert "".join(terminal.writes) == text and len([w for w in terminal.writes if w]) > 20
    row.tokens.append(tokenizer.encode_batch(["字"])[0][0])  # ends inside a character
    row.finish = "length"
    display.update()
    assert terminal.getvalue() == text + "\N{REPLACEMENT CHARACTER}\n"


def test_rows_are_shown_in_order_while_all_grow(tokenizer) -> None:
    rows = [Row(Prompt(f"p{i}:", f"line {i}", (0,), 9, 0), 0) for i in range(2)]
    terminal = Terminal()
    display = Display(rows, tokenizer, terminal, heading=True, with_prompt=True)
    for step, token in enumerate(tokenizer.encode_batch(["abc"])[0]):
        for row in rows:
            row.tokens.append(token)
        rows[0].finish = "length" if step == 1 else rows[0].finish
        display.update()
        assert ("line 1" in terminal.getvalue()) == (step >= 1)
        if rows[0].finish:
            rows[0].tokens = rows[0].tokens[:2]
    assert terminal.getvalue() == "--- line 0, sample 0\np0:ab\n--- line 1, sample 0\np1:abc"


def test_a_result_is_one_line_of_json(tokenizer) -> None:
    row = Row(Prompt("two\nlines", "p", (1,), 9, 0), 3, tokenizer.encode_batch(["漢\n"])[0], "length")
    line = as_json(row, tokenizer)
    assert "\n" not in line
    assert json.loads(line) == {
        "prompt": "two\nlines",
        "sample": 3,
        "text": "漢\n",
        "tokens": row.tokens,
        "finish": "length",
    }
