"""The configuration of text generation: the typed form of `conf/generate.yaml`."""

from dataclasses import dataclass

from .checks import ACCELERATORS, require_one_of, require_path, require_positive, require_seed
from .from_dict import build
from .training import PrecisionConfig

LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class Sampling:
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

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE):  # smaller ones overflow the scores
            raise ValueError(f"`temperature` must be 0 or at least {LEAST_TEMPERATURE}, but is {self.temperature!r}")
        if self.top_k is not None:
            require_positive(self, "top_k")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, but is {self.top_p!r}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            name = "top_p" if self.top_k is None else "top_k"
            raise ValueError(
                f"`{name}` must be left alone with temperature=0, which draws nothing, but is {getattr(self, name)!r}"
            )


@dataclass(frozen=True)
class GenerateParallel:
    """`parallel=`: ranks that share the model.

    Args:
        tp_size: tensor-parallel ranks.
        pad_heads: see `Layout`.
    """

    tp_size: int = 1
    pad_heads: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "tp_size")


@dataclass(frozen=True)
class GenerateTokenizer:
    """`tokenizer=`: `gpt2` reads published files instead of those beside the checkpoint.

    Args:
        kind: `gpt2`; None if the group is not chosen.
        path: a tokenizer.json, or a folder with it, with encoder.json and vocab.bpe, or with vocab.json and merges.txt;
            without `kind` it implies `tokenizer=gpt2`.
        name: on the Hugging Face hub, if `tokenizer=gpt2` is chosen without a path.
    """

    kind: str | None = None
    path: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in (None, "gpt2"):
            raise ValueError(f"`tokenizer` must be gpt2, or left alone for the checkpoint's own, but is {self.kind}")


@dataclass(frozen=True)
class GenerateConfig:
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
        temperature: scores are divided by it; 0: the most probable token.
        top_k: draw from this many most probable tokens; None: from all.
        top_p: draw from the fewest most probable tokens whose probabilities add up to it; 1: from all.
        seed: of the samples; they depend neither on `tp_size` nor on the other prompts.
        micro_batch_size: samples generated together.
        precision: its `dtype` is that of weights and arithmetic.
        accelerator: `auto` (a GPU if there is one), `cpu` or `gpu`.

    Raises:
        ValueError: an invalid value; none or several of `prompt`, `file` and `interactive`.
    """

    ckpt: str
    prompt: str | None = None
    file: str | None = None
    interactive: bool = False
    out: str | None = None
    stream: bool = True
    num_samples: int = 1
    max_new_tokens: int | None = 64
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1234
    micro_batch_size: int = 8
    precision: PrecisionConfig = PrecisionConfig("fp32")
    accelerator: str = "auto"
    parallel: GenerateParallel = GenerateParallel()
    tokenizer: GenerateTokenizer = GenerateTokenizer()

    def __post_init__(self) -> None:
        require_path(self, "ckpt")
        self.precision.refuse_float8()
        given = [name for name in ("prompt", "file") if getattr(self, name) is not None]
        given += ["interactive"] if self.interactive else []
        if len(given) != 1:
            raise ValueError(
                f"`prompt` must be given, or `file`, or interactive=true, and one of them, but "
                f"{' and '.join(given) + ' are' if given else 'none is'}"
            )
        require_positive(self, "num_samples", "micro_batch_size")
        if self.max_new_tokens is not None:
            require_positive(self, "max_new_tokens")
        require_seed(self)
        if not self.stream and (self.out is None or self.interactive):
            raise ValueError("`stream` must be true where the text would go nowhere else, but is false")
        require_one_of(self, "accelerator", ACCELERATORS)
        _ = self.sampling  # its rules

    @property
    def sampling(self) -> Sampling:
        """The keys of `Sampling`."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @classmethod
    def from_dict(cls, values: dict) -> "GenerateConfig":
        """Build from plain values; `run_dir` and `overrides`, which the entry point adds, are not part of a generation.

        Raises:
            ValueError: an unknown key, a missing one or a value of a different type.
        """
        return build(cls, {key: value for key, value in values.items() if key not in ("run_dir", "overrides")}, "")
