"""One text generation, from its configuration to its texts: checks before the ranks start, and the work per rank."""

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ..config import Layout
from ..config.generate import GenerateConfig
from ..data.tokenizer import END_OF_TEXT, Tokenizer
from ..runtime.exit_codes import DONE
from ..text.formats import UnreadableError, plain_bytes
from ..trained_model import load_model
from .generation import Display, Generator, as_json, in_batches
from .loading import DTYPES, check_model
from .prompts import Prompt, PromptReader, Row, read_prompts
from .ranks import RankPlace, run_on_rank

PROMPT_TIMEOUT = timedelta(days=7)  # how long ranks wait for the user to type


@dataclass(frozen=True)
class GenerateJob:
    """The data sent to every rank; all files have been read.

    Args:
        prompts: None if the user types them.
    """

    config: GenerateConfig
    reader: PromptReader
    prompts: list[Prompt] | None


def prepare(config: GenerateConfig) -> GenerateJob:
    """Check everything that does not need the weights.

    Raises:
        ValueError: see `check_model`; a prompt cannot be used; or `out` exists or cannot be created.
    """
    model, tokenizer = check_model(config)
    reader = PromptReader(tokenizer, model, config.max_new_tokens, config.num_samples)
    if config.out is not None:
        _check_out(Path(config.out))
    prompts = None
    if not config.interactive:
        texts = [("prompt", config.prompt)] if config.file is None else read_prompts(config.file)
        prompts = [reader.read(text, name) for name, text in texts]
    return GenerateJob(config, reader, prompts)


def _check_out(path: Path) -> None:
    if path.exists():
        raise ValueError(f"`out` must be a file that does not exist yet, but {path} does")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"`out` must be in a folder that exists, but {path.parent} does not")


@record
def generate(job: GenerateJob) -> int:
    """Generate on this rank; rank 0 writes.

    Returns:
        exit code: 0; 128 + SIGPIPE if the reader of standard output has closed it; with several ranks `USER_ERROR`,
        after the error message.

    Raises:
        ValueError: with one rank, if the weights cannot be loaded or used, or a file cannot be written.
    """
    layout = Layout(**vars(job.config.parallel))
    return run_on_rank(partial(_generate_until_closed, job), job.config.accelerator, layout)


def _generate_until_closed(job: GenerateJob, place: RankPlace) -> int:
    try:
        _generate(job, place)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()  # Python's final flush
        return 128 + signal.SIGPIPE
    return DONE


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _generate(job: GenerateJob, place: RankPlace) -> None:
    config, tokenizer, ranks = job.config, job.reader.tokenizer, place.ranks
    loaded = load_model(config.ckpt, place.context, DTYPES[config.precision.dtype], place.device, ranks)
    end_id = tokenizer.inner.token_to_id(END_OF_TEXT)
    generator = Generator(loaded.model, config, end_id, config.seed)
    heading = config.num_samples * len(job.prompts or [""]) > 1
    with contextlib.ExitStack() as stack:
        # Only rank 0 writes. After its error alone the others would wait in their next collective.
        writes = ranks.is_first and config.out is not None
        out = ranks.agree(lambda: stack.enter_context(_open_out(config.out)) if writes else None)
        failure: OSError | None = None

        def on_token() -> None:
            nonlocal failure
            place.watchdog.mark("generation")
            if not (ranks.is_first and config.stream):
                return
            try:
                display.update()
            except OSError as error:
                if ranks.size == 1 and out is None and isinstance(error, BrokenPipeError):
                    raise
                _discard_output()
                failure = error

        def write() -> bool:
            """Write a batch; returns whether the output still has a reader."""
            _write(out, batch, tokenizer)
            if failure is not None and not isinstance(failure, BrokenPipeError):
                raise failure
            return failure is None

        batches = [job.prompts] if job.prompts is not None else _typed_prompts(job.reader, place)
        for prompts in batches:
            rows = [row for prompt in prompts for row in job.reader.rows(prompt)]
            # A typed prompt is on the terminal already.
            display = Display(rows, tokenizer, sys.stdout, heading, with_prompt=job.prompts is not None)
            for batch in in_batches(rows, config.micro_batch_size):
                generator.extend(batch, on_token)
                if not all(ranks.gather(ranks.agree(write))):
                    raise BrokenPipeError
    if out is not None:
        print(f"wrote {config.out}")


def _typed_prompts(reader: PromptReader, place: RankPlace) -> Iterator[list[Prompt]]:
    """Yield prompts from the lines of standard input; a prompt that cannot be used prints its error.

    Communicates:
        rank 0 broadcasts each prompt over a separate group, whose timeout allows for a user who types slowly.
    """
    group = dist.new_group(backend="gloo", timeout=PROMPT_TIMEOUT) if place.ranks.size > 1 else None
    lines = _usable_lines(reader) if place.ranks.is_first else None
    while True:
        place.watchdog.pause()
        typed = [next(lines, None) if lines is not None else None]
        if group is not None:
            dist.broadcast_object_list(typed, src=0, group=group)
        place.watchdog.mark("generation")
        if typed[0] is None:
            return
        yield typed


def _usable_lines(reader: PromptReader) -> Iterator[Prompt]:
    # A spawned rank has no sys.stdin, but file descriptor 0 is still open.
    with open(0, "rb", closefd=False) as file:
        is_person = file.isatty()
        for number in itertools.count(1):
            if is_person:
                print("> ", end="", flush=True)
            line = file.readline()
            if not line:
                return
            try:
                for text in plain_bytes(line, number, "a prompt ").splitlines():
                    yield reader.read(text.decode(), "prompt")
            except UnicodeDecodeError:
                print("error: a prompt must be UTF-8", file=sys.stderr, flush=True)
            except (UnreadableError, ValueError) as error:
                print(f"error: {error}", file=sys.stderr, flush=True)


def _open_out(path: str) -> TextIO:
    try:
        return open(path, "x", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"`out` must be a file that can be created, but {path}: {error.strerror}") from None


def _write(out: TextIO | None, rows: Sequence[Row], tokenizer: Tokenizer) -> None:
    if out is None:
        return
    try:
        out.writelines(as_json(row, tokenizer) + "\n" for row in rows)
        out.flush()
    except OSError as error:
        raise ValueError(f"`out` could not be written to its end: {error.strerror}") from None
