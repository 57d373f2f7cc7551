"""The configuration of text generation: the typed form of `conf/generate.yaml`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .checks import Accelerator, Checked, PathText, Positive, Rule, Seed, Share, require
from .data import check_one_source
from .from_dict import EntryConfig
from .training import PrecisionConfig

# Smaller temperatures overflow the scores.
Temperature = Annotated[float, Rule("0 or at least 0.0001", lambda number: number == 0 or number >= 1e-4)]


@dataclass(frozen=True)
class Sampling(Checked):
    """How the next token is chosen.

    Args:
        temperature: scores are divided by it; 0: the most probable token.
        top_k: draw from this many most probable tokens; None: from all.
        top_p: then from the fewest most probable tokens whose probabilities add up to it; 1: from all.

    Raises:
        ValueError: a value outside its range, or a limit with temperature 0, which draws nothing.

    Source: order and meaning as in transformers' `generate`; equally probable tokens count in the order of their ids.
        Top-p: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """

    temperature: Temperature = 1.0
    top_k: Positive | None = None
    top_p: Share = 1.0

    def check_rules(self) -> None:
        for name, default in (("top_k", None), ("top_p", 1)):
            is_free = self.temperature > 0 or getattr(self, name) == default
            require(self, name, "left alone with temperature=0, which draws nothing", is_free)


@dataclass(frozen=True)
class GenerateParallel(Checked):
    """`parallel=`: ranks that share the model.

    Args:
        tp_size: tensor-parallel ranks.
        pad_heads: see `Layout`.
    """

    tp_size: Positive = 1
    pad_heads: bool = False


@dataclass(frozen=True)
class GenerateTokenizer(Checked):
    """`tokenizer=`: `gpt2` reads published files instead of those beside the checkpoint.

    Args:
        kind: `gpt2`; None if the group is not chosen.
        path: a tokenizer.json, or a folder with it, with encoder.json and vocab.bpe, or with vocab.json and merges.txt;
            without `kind` it implies `tokenizer=gpt2`.
        name: on the Hugging Face hub, if `tokenizer=gpt2` is chosen without a path.

    Raises:
        ValueError: a name without `kind` or beside a path.
    """

    kind: Literal["gpt2"] | None = None
    path: PathText | None = None
    name: str | None = None

    def check_rules(self) -> None:
        require(self, "name", "left out without tokenizer=gpt2", self.name is None or self.kind is not None)
        check_one_source(self)

    def words(self) -> list[str]:
        """The words that choose it on the command line of `src/generate.py`, which takes a path literally."""
        keys = {"": self.kind, ".path": self.path, ".name": self.name if self.path is None else None}
        return [f"tokenizer{key}={value}" for key, value in keys.items() if value is not None]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EntryConfig, Sampling):
    """One generation of text.

    Args:
        ckpt: an lmscale checkpoint at any layout, a run folder (its newest one), or a folder with a Hugging Face GPT-2.
        prompt: text to continue; an empty one starts a document.
        file: prompts, one per line, or .jsonl with {"prompt": text} on each line.
        interactive: read prompts from standard input, one per line.
        out: a file that does not exist yet, for one line of JSON per sample.
        stream: write to the terminal.
        num_samples: of each prompt.
        max_new_tokens: of a sample; None: as many as the model's positions allow.
        seed: of the samples; they depend neither on `tp_size` nor on the other prompts.
        micro_batch_size: samples generated together.
        precision: its `dtype` is that of weights and arithmetic.
        accelerator: `auto`: a GPU if there is one.

    Raises:
        ValueError: an invalid value; none or several of `prompt`, `file` and `interactive`.
    """

    ckpt: PathText
    prompt: str | None = None
    file: PathText | None = None
    interactive: bool = False
    out: PathText | None = None
    stream: bool = True
    num_samples: Positive = 1
    max_new_tokens: Positive | None = 64
    seed: Seed = 1234
    micro_batch_size: Positive = 8
    precision: PrecisionConfig = PrecisionConfig("fp32")
    accelerator: Accelerator = "auto"
    parallel: GenerateParallel = GenerateParallel()
    tokenizer: GenerateTokenizer = GenerateTokenizer()

    def check_rules(self) -> None:
        super().check_rules()
        self.precision.refuse_float8()
        given = [name for name in ("prompt", "file") if getattr(self, name) is not None]
        given += ["interactive"] if self.interactive else []
        if len(given) != 1:
            raise ValueError(
                f"`prompt` must be given, or `file`, or interactive=true, and one of them, but "
                f"{' and '.join(given) + ' are' if given else 'none is'}"
            )
        is_kept = self.out is not None and not self.interactive
        require(self, "stream", "true where the text would go nowhere else", self.stream or is_kept)
