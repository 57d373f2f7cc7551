"""One generation from its configuration to its texts: what is checked before ranks start, and what each rank does."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ..config.family import family_of
from ..config.generate import GenerateConfig
from ..data.tokenizer import END_OF_TEXT, Tokenizer
from ..parallel import ParallelContext
from .generation import Display, Generator, as_json, in_batches
from .loading import describe_checkpoint, evaluation_groups, find_tokenizer_beside, load_model
from .prompts import Prompt, PromptReader, Row, read_prompts
from .tokenizer_choice import choose_tokenizer, open_given

MISTAKE = 2  # exit code of a rank that met what the user must mend, as in the door
A_WEEK = timedelta(days=7)  # how long ranks wait for a person to type
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GenerateJob:
    """What every rank gets: all decided, nothing of it read twice.

    Args:
        prompts: None where they are still to be typed.
    """

    config: GenerateConfig
    reader: PromptReader
    prompts: list[Prompt] | None


def prepare(config: GenerateConfig) -> GenerateJob:
    """Check everything that can be without the weights.

    Raises:
        ValueError: a checkpoint that is missing, damaged or no GPT, or that `tp_size` does not divide; a tokenizer that
            is missing or not the model's; a prompt that cannot be used; an `out` that exists or cannot be made.
    """
    given = open_given(config.tokenizer)
    model, beside = describe_checkpoint(config.ckpt)
    if not family_of(model.family).is_causal:
        kind = model.family.upper()
        raise ValueError(f"`ckpt` must be a GPT, which generates from left to right, but {config.ckpt} is a {kind}")
    model.check_tensor_parallel(config.parallel.tp_size)
    if config.accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("`accelerator` must be cpu or auto on a machine without a GPU, but is gpu")
    tokenizer = choose_tokenizer(given, find_tokenizer_beside(beside, model), model, config.ckpt)
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
    """Generate on this rank; the first one writes.

    Returns:
        exit code: 0; 128 + SIGPIPE where nobody reads the text any more; with several ranks `MISTAKE`, after the line
        that says what is wrong.

    Raises:
        ValueError: with one rank, weights that cannot be loaded or used, a file that cannot be written.
    """
    config = job.config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // config.parallel.tp_size))
    device = _device(config)
    context = evaluation_groups(config.parallel.tp_size, 1, device.type)
    try:
        _generate(job, context, device)
    except BrokenPipeError:  # whoever reads the text has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python would still write at its end
        return 128 + signal.SIGPIPE
    except ValueError as error:  # on every rank: what is wrong was decided together
        if context.tp_size == 1:
            raise
        if context.tp_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return MISTAKE
    return 0


def _device(config: GenerateConfig) -> torch.device:
    if config.accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _generate(job: GenerateJob, context: ParallelContext, device: torch.device) -> None:
    config, tokenizer = job.config, job.reader.tokenizer
    loaded = load_model(config.ckpt, context, _DTYPES[config.precision.dtype], device)
    end_id = tokenizer.inner.token_to_id(END_OF_TEXT)
    generator = Generator(loaded.model, config.sampling, end_id, config.seed)
    is_first = context.tp_rank == 0
    heading = config.num_samples * len(job.prompts or [""]) > 1
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_open_out(config.out)) if is_first and config.out is not None else None
        batches = [job.prompts] if job.prompts is not None else _typed_prompts(job.reader, context)
        for prompts in batches:
            rows = [row for prompt in prompts for row in job.reader.rows(prompt)]
            # A prompt that was just typed stands on the terminal already.
            display = Display(rows, tokenizer, sys.stdout, heading, with_prompt=job.prompts is not None)
            for batch in in_batches(rows, config.micro_batch_size):
                generator.lengthen(batch, display.update if is_first and config.stream else _ignore)
                if out is not None:
                    _write(out, batch, tokenizer)
    if out is not None:
        print(f"wrote {config.out}")


def _ignore() -> None:
    """Heard on ranks that do not write."""


def _typed_prompts(reader: PromptReader, context: ParallelContext) -> Iterator[list[Prompt]]:
    """Prompts from standard input, a line each, until it ends; one that cannot be used is answered with its error.

    Communicates:
        the first rank's prompt is broadcast, over a group of its own: torch's usual timeout would end the ranks while
        somebody thinks.
    """
    group = dist.new_group(backend="gloo", timeout=A_WEEK) if context.tp_size > 1 else None
    lines = _usable_lines(reader) if context.tp_rank == 0 else None
    while True:
        typed = [next(lines, None) if lines is not None else None]
        if group is not None:
            dist.broadcast_object_list(typed, src=0, group=group)
        if typed[0] is None:
            return
        yield typed


def _usable_lines(reader: PromptReader) -> Iterator[Prompt]:
    # A rank that was started as a process has no sys.stdin, but still the file behind it.
    with open(0, "rb", closefd=False) as file:
        is_person = file.isatty()
        while True:
            if is_person:
                print("> ", end="", flush=True)
            line = file.readline()
            if not line:
                return
            try:
                text = line.decode().removesuffix("\n").removesuffix("\r")
                yield reader.read(text, "prompt")
            except UnicodeDecodeError:
                print("error: a prompt must be UTF-8", file=sys.stderr, flush=True)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)


def _open_out(path: str) -> TextIO:
    try:
        return open(path, "x", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"`out` must be a file that can be made, but {path}: {error.strerror}") from None


def _write(out: TextIO, rows: list[Row], tokenizer: Tokenizer) -> None:
    try:
        out.writelines(as_json(row, tokenizer) + "\n" for row in rows)
        out.flush()
    except OSError as error:
        raise ValueError(f"`out` could not be written to its end: {error.strerror}") from None
