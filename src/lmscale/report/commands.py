"""The commands that would repeat the paper's runs. A test composes each; the machines and data are not ours."""

from .ledger import DATA_RANKS, GPT_MODELS
from .scaling import MICRO_BATCH

PREPARE = (
    "python src/prepare_data.py corpus=[wikipedia,cc_stories,realnews,openwebtext] tokenizer=gpt2 output=data/paper"
)
PREPARE_BERT = (
    "python src/prepare_data.py corpus=[wikipedia,cc_stories,realnews,openwebtext,bookscorpus] tokenizer=bert "
    "architecture=bert output=data/paper_bert"
)
PREPARE_LAMBADA = f"{PREPARE}_lambada evaluation=[wikitext103,lambada]"
# WikiText-103's own training part, in its raw form, as the corpus: reports/leakage.json says what of the test set is in
# it. A share of 1 removes copies of whole articles alone; a thousandth is held out.
PREPARE_WIKITEXT = (
    "python src/prepare_data.py sources.local.path=wiki.train.raw.txt cleaning=none dedup=none overlap.share=1.0 "
    "validation_every=1000 tokenizer=gpt2 output=data/wikitext103"
)
GENERATE = "python src/generate.py ckpt=outputs/gpt_8.3b_24heads prompt=TEXT"
COST_MODEL = "python analysis/fit_cost_model.py"
_BERT_DATA = "tokenizer=bert data=indexed data.path=data/paper_bert"
COUNT_WIKITEXT = "python src/zero_shot.py task=wikitext103 task.path=wiki.test.tokens tokenizer=gpt2 count_only=true"


def pretrain(model: str, tp_size: int, dp_size: int, *more: str) -> str:
    """One pretraining as the paper did it: fp16, every layer recomputed."""
    layout = f"parallel.tp_size={tp_size} parallel.dp_size={dp_size}"
    return " ".join((f"python src/train.py model={model} {layout} precision=fp16 model.recompute=full", *more))


def study(size: str, heads: int, tp_size: int, dp_size: int) -> str:
    """One cell of the scaling study: one micro-batch a data rank."""
    batch = f"micro_batch_size={MICRO_BATCH} global_batch_size={MICRO_BATCH * dp_size}"
    return pretrain(study_name(size, heads), tp_size, dp_size, batch)


def study_name(size: str, heads: int) -> str:
    """A model of the scaling study in `conf/model/`: Table 7 has its 8.3 B with other heads."""
    variants = {("8.3B", 16): "gpt_8.3b_16heads", ("8.3B", 24): "gpt_8.3b_24heads"}
    return variants.get((size, heads), f"gpt_{size.lower()}")


def gpt_name(size: str) -> str:
    """A model of Table 2 in `conf/model/`: its 8.3 B has 24 heads."""
    return "gpt_8.3b_24heads" if size == "8.3B" else f"gpt_{size.lower()}"


def train_gpt(size: str) -> str:
    """A training of Table 2."""
    tp_size = GPT_MODELS[size].num_gpus // DATA_RANKS
    own = f"hydra.run.dir=outputs/{gpt_name(size)}"  # where the commands behind it look
    return pretrain(gpt_name(size), tp_size, DATA_RANKS, "tokenizer=gpt2 data=indexed data.path=data/paper", own)


def train_bert(size: str, num_gpus: int, *more: str) -> str:
    """A training of Table 4, whose layout the paper does not give."""
    tp_size = {"1.3B": 2, "3.9B": 8}.get(size, 1)
    own = f"hydra.run.dir=outputs/bert_{size.lower()}"
    return pretrain(f"bert_{size.lower()}", tp_size, num_gpus // tp_size, _BERT_DATA, own, *more)


def figure_7(size: str, order: str) -> str:
    """One of the four runs of Figure 7."""
    model = f"model=bert_{size.lower()} model.norm_order={order} parallel.dp_size=128"
    return f"python src/train.py experiment=fig7_paper hydra.mode=RUN {model} {_BERT_DATA}"


def zero_shot(task: str, size: str) -> str:
    """An evaluation of Table 3."""
    file = {"wikitext103": "wiki.test.tokens", "lambada": "lambada_test.jsonl"}[task]
    return f"python src/zero_shot.py task={task} task.path={file} ckpt=outputs/{gpt_name(size)}"


def finetune(task: str, size: str, sweep: str = "five_seeds") -> str:
    """The finetunings behind a value of Tables 5 and 6; of RACE, Table 5 has the test set."""
    search = sweep == "finetune_search"
    test = " '+task.test.test=hub:test'" if task == "race" and not search else ""
    return (
        f"python finetune/run.py task={task} size={size.lower()} ckpt=outputs/bert_{size.lower()} sweep={sweep}{test} "
        f"hydra.sweep.dir=multirun/{task}_{size.lower()}{'_search' if search else ''}"
    )


def ensemble(task: str, size: str) -> str:
    """Five finetunings combined."""
    runs = " ".join(f"multirun/{task}_{size.lower()}/{seed}" for seed in range(5))
    return f"python finetune/ensemble.py {runs} --out outputs/{task}_ensemble"
