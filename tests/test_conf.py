"""Every file of `conf/` composes into the typed configuration, and every key is read by something and documented."""

import ast
import dataclasses
import functools
from pathlib import Path

import pytest
from composed import composed
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lmscale.cli.reference import ENTRY_POINTS, REFERENCE, format_reference, groups, keys
from lmscale.cli.reference import composed as composed_script
from lmscale.config import TransformerConfig
from lmscale.config import corpus as corpus_config
from lmscale.config import generate as generate_config
from lmscale.config import model as model_config
from lmscale.config import pretrain as run_config
from lmscale.config import zero_shot as zero_shot_config
from lmscale.config.corpus import PrepareConfig
from lmscale.config.data import TokenizerConfig
from lmscale.config.pretrain import RunConfig

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
TINY_VOCAB_SIZE = 1999  # in place of the tokenizer's size, which is not in a file
# Files that need further keys for a complete run.
REQUIRED = {("data", "local"): ["data.path=corpus.txt"], ("data", "huggingface"): ["data.name=wikitext"]}
REQUIRED["data", "indexed"] = ["data.path=dataset"]
REQUIRED["schedule", "wsd"] = ["schedule.cooldown_steps=60"]
OF_ONE_ENTRY_POINT = ("train", "finetune", "zero_shot", "prepare_data")  # folders of groups of one entry point


def choices_in(folder: Path) -> dict[str, list[str]]:
    """The choices of every group in a folder."""
    groups = [group for group in sorted(folder.iterdir()) if group.is_dir() and group.name not in OF_ONE_ENTRY_POINT]
    return {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}


GROUPS = choices_in(CONF)  # shared by entry points
OWN_GROUPS = {entry_point: choices_in(CONF / entry_point) for entry_point in OF_ONE_ENTRY_POINT}
TRAIN_GROUPS = ["model", "data", "tokenizer", "parallel", "optimizer", "schedule", "trainer", "precision"]
TRAIN_GROUPS += ["checkpoint", "logger", "recipe"]
CHOICES = [(group, choice) for group in TRAIN_GROUPS for choice in GROUPS[group] if group != "recipe"]  # a model's own
CHOICES += [("fidelity", choice) for choice in OWN_GROUPS["train"]["fidelity"]]
PREPARE_CHOICES = [("tokenizer", choice) for choice in GROUPS["tokenizer"]]
PREPARE_CHOICES += [(group, choice) for group, choices in OWN_GROUPS["prepare_data"].items() for choice in choices]


compose_train = functools.partial(composed, "train")


def build(values: dict) -> tuple[RunConfig, TransformerConfig]:
    run = RunConfig.from_dict({**values, "run_dir": "/somewhere"})
    return run, run.model.resolve(TINY_VOCAB_SIZE)


@pytest.mark.parametrize("group, choice", CHOICES)
def test_every_choice_of_every_group_builds_the_typed_configuration(group: str, choice: str) -> None:
    values = compose_train(f"{group}={choice}", *REQUIRED.get((group, choice), []))
    run, _ = build(values)
    assert run.name == values["model"]["name"]


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("model", ["bert_336m", "bert_752m"])
def test_figure_7_at_full_size_uses_the_papers_recipe_for_both_orders(model: str, order: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        params = compose("train", ["experiment=fig7_paper"], return_hydra_config=True).hydra.sweeper.params
    assert model in params["model"].split(",") and order in params["model.norm_order"].split(",")
    run, sizes = build(compose_train("experiment=fig7_paper", f"model={model}", f"model.norm_order={order}"))
    alone, _ = build(compose_train(f"model={model}"))
    assert (run.optimizer, run.schedule, run.global_batch_size) == (alone.optimizer, alone.schedule, 1024)
    assert (run.name, sizes.norm_order, run.trainer.max_steps) == (f"fig7_{model}_{order}", order, 2_000_000)


@pytest.mark.parametrize(("model", "recipe"), [("gpt_8.3b", "bert_tiny"), ("bert_3.9b", "gpt_tiny")])
def test_a_model_composes_with_the_recipe_of_another_one(model: str, recipe: str) -> None:
    run, sizes = build(compose_train(f"model={model}", f"recipe={recipe}"))
    assert run.name == model
    assert run.data.seq_length == sizes.max_position_embeddings


def test_every_group_is_tested() -> None:
    assert sorted(GROUPS) == sorted([*TRAIN_GROUPS, "cluster"])


@pytest.mark.parametrize(
    "entry_point, group, choice",
    [("plan", "cluster", choice) for choice in GROUPS["cluster"]]
    + [
        (entry_point, group, choice)
        for entry_point in ("train", "finetune", "zero_shot")
        for group, choices in OWN_GROUPS[entry_point].items()
        for choice in choices
    ],
)
def test_every_choice_of_an_entry_points_own_groups_composes(entry_point: str, group: str, choice: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert compose(entry_point, [f"{group}={choice}"])


@pytest.mark.parametrize("group, choice", PREPARE_CHOICES)
def test_every_choice_of_a_preparation_builds_its_typed_configuration(group: str, choice: str) -> None:
    needs = {"bookscorpus": ["architecture=bert"], "slurm": ["launcher.partition=cpu"]}.get(choice, [])
    if (group, choice) != ("corpus", "local"):
        needs = ["corpus=wikipedia", *needs] if group != "corpus" else needs
    else:
        needs = ["sources.local.path=corpus.txt"]
    PrepareConfig.from_dict(composed("prepare_data", f"{group}={choice}", "output=out", *needs))


def test_every_model_has_the_recipe_of_its_name() -> None:
    assert GROUPS["recipe"] == GROUPS["model"]


@pytest.mark.parametrize("model", GROUPS["model"])
def test_a_model_states_every_size_of_the_transformer(model: str) -> None:
    stated = set(compose_train(f"model={model}")["model"])
    assert stated == {field.name for field in dataclasses.fields(TransformerConfig)}


@pytest.mark.parametrize("model", GROUPS["model"])
def test_every_model_takes_completep_with_the_base_of_the_guide_which_is_a_standard_model(model: str) -> None:
    _, plain = build(compose_train(f"model={model}"))
    sizes = {"hidden_size": 4 * plain.head_size, "num_layers": 4}
    bases = [f"model.base_{name}={size}" for name, size in sizes.items()]
    run, config = build(compose_train(f"model={model}", "model.parametrization=completep", *bases))
    rules = config.scaling
    assert (rules.width, rules.depth) == (plain.hidden_size / (4 * plain.head_size), plain.num_layers / 4)
    assert (rules.attention_factor, run.model.norm_order) == (1.0, "pre")
    base = dataclasses.replace(config, **sizes, num_attention_heads=4).scaling
    assert (base.output_factor, base.residual_factor, base.residual_layers) == (1.0, 1.0, 4)
    assert base.std_factor("hidden") == base.rate_factor("hidden") == base.eps_factor(inside=True) == 1.0


@pytest.mark.parametrize(
    "model, layers, hidden, heads, rows, positions",
    [
        ("gpt_355m", 24, 1024, 16, 51200, 1024),
        ("gpt_1.2b", 40, 1536, 16, 51200, 1024),
        ("gpt_2.5b", 54, 1920, 20, 51200, 1024),
        ("gpt_4.2b", 64, 2304, 24, 51200, 1024),
        ("gpt_8.3b", 72, 3072, 32, 51200, 1024),
        ("gpt_8.3b_24heads", 72, 3072, 24, 51200, 1024),
        ("gpt_8.3b_16heads", 72, 3072, 16, 51200, 1024),
        ("bert_336m", 24, 1024, 16, 30720, 512),
        ("bert_752m", 36, 1280, 20, 30720, 512),
        ("bert_1.3b", 24, 2048, 32, 30720, 512),
        ("bert_3.9b", 48, 2560, 40, 30720, 512),
    ],
)
def test_model_sizes_match_tables_1_2_and_4(model, layers, hidden, heads, rows, positions) -> None:
    _, sizes = build(compose_train(f"model={model}"))
    assert (sizes.num_layers, sizes.hidden_size, sizes.num_attention_heads) == (layers, hidden, heads)
    assert (sizes.padded_vocab_size, sizes.max_position_embeddings) == (rows, positions)
    assert sizes.family == model.split("_")[0]
    assert sizes.norm_order == "pre" and sizes.hidden_dropout == 0.1 and sizes.attention_dropout == 0.1


def test_the_paper_recipes_have_the_values_of_section_5() -> None:
    gpt, _ = build(compose_train("model=gpt_2.5b"))
    assert (gpt.global_batch_size, gpt.optimizer.lr, gpt.trainer.max_steps) == (512, 1.5e-4, 300_000)
    schedule = gpt.schedule
    assert (schedule.decay, schedule.warmup_steps, schedule.decay_steps, schedule.min_lr) == (
        "cosine",
        3000,
        300_000,
        1e-5,
    )
    bert, _ = build(compose_train("model=bert_3.9b"))
    assert (bert.global_batch_size, bert.optimizer.lr, bert.trainer.max_steps) == (1024, 1e-4, 1_500_000)
    assert (bert.schedule.decay, bert.schedule.warmup_steps, bert.schedule.decay_steps) == ("linear", 10_000, 2_000_000)


def test_the_command_line_overrides_the_recipe() -> None:
    run, _ = build(compose_train("model=gpt_355m", "schedule=linear", "precision=fp16", "optimizer.lr=3e-4"))
    assert (run.schedule.decay, run.precision.dtype, run.optimizer.lr) == ("linear", "fp16", 3e-4)


@pytest.mark.parametrize("model", ["gpt_355m", "bert_336m"])
def test_every_fidelity_composes_with_a_model_and_its_recipe(model: str) -> None:
    recipes = set()
    for word in OWN_GROUPS["train"]["fidelity"]:
        run, _ = build(compose_train(f"model={model}", f"fidelity={word}"))
        assert run.fidelity == word
        schedule = dataclasses.replace(run.schedule, formula="paper")
        recipes.add((run.global_batch_size, run.optimizer.lr, schedule, run.trainer, run.precision))
    assert len(recipes) == 1  # no fidelity changes the recipe


def test_the_default_fidelity_sets_nothing() -> None:
    assert compose_train() == compose_train("~fidelity") | {"fidelity": "paper"}


def test_the_command_line_overrides_the_fidelity() -> None:
    given = ("schedule.formula=paper", "model.gelu=tanh", "dropout_seeds=unique")
    run, sizes = build(compose_train(*given, "fidelity=megatron_v1"))
    assert (run.schedule.formula, sizes.gelu_form, run.dropout_seeds) == ("paper", "tanh", "unique")
    assert (run.loss_reduction, run.fidelity) == ("mean_of_means", "megatron_v1")


def test_the_decay_ends_with_the_run_by_default() -> None:
    run, _ = build(compose_train("trainer.max_steps=71"))
    assert run.schedule.decay_steps == 71


def read_attributes(path: Path, defined_here: set[str]) -> set[str]:
    """Names of attributes read in a module, without the bodies of the classes in `defined_here`."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef) and node.name in defined_here:
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def properties_reading(cls: type) -> dict[str, set[str]]:
    """The fields that each property of `cls` reads."""
    tree = ast.parse(Path(model_config.__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    methods = [n for n in body.body if isinstance(n, ast.FunctionDef) and n.name != "__post_init__"]
    return {m.name: {n.attr for n in ast.walk(m) if isinstance(n, ast.Attribute)} for m in methods}


def test_every_key_is_read_by_something() -> None:
    classes = {
        cls.__name__: cls
        for cls in vars(run_config).values()
        if dataclasses.is_dataclass(cls)
        and cls.__module__.endswith((".config.pretrain", ".config.data", ".config.training"))
    }
    classes["TransformerConfig"] = TransformerConfig
    for module in (corpus_config, generate_config, zero_shot_config):
        classes |= {name: cls for name, cls in vars(module).items() if dataclasses.is_dataclass(cls)}
    read = set().union(*(read_attributes(path, set(classes)) for path in (ROOT / "src").rglob("*.py")))
    for name, reads in properties_reading(TransformerConfig).items():
        if name in read:
            read |= reads
    unread = {
        f"{name}.{field.name}"
        for name, cls in classes.items()
        for field in dataclasses.fields(cls)
        if field.name not in read
    }
    assert not unread, f"no code reads {sorted(unread)}"


def written_values(node: dict, prefix: str = "") -> dict[str, object]:
    """The literal values of a file by dotted key, without interpolations and missing values."""
    found = {}
    for key, value in node.items():
        if isinstance(value, dict):
            found |= written_values(value, f"{prefix}{key}.")
        elif not (isinstance(value, str) and ("${" in value or value == "???")):
            found[f"{prefix}{key}"] = value
    return found


@pytest.mark.parametrize(
    "entry_point", ["cache_logits", "convert", "finetune", "generate", "plan", "prepare_data", "zero_shot"]
)
def test_groups_do_not_override_the_entry_points_own_file(entry_point: str) -> None:
    """Except train.yaml, whose recipes are meant to override it."""
    written = OmegaConf.to_container(OmegaConf.load(CONF / f"{entry_point}.yaml"))
    own = written_values({key: value for key, value in written.items() if key not in ("defaults", "hydra")})
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = compose(entry_point, ["task=lambada"] if entry_point == "zero_shot" else [])
    assert {key: OmegaConf.select(found, key) for key in own} == own


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_published_tokenizer_is_read_from_a_path_without_another_key(kind: str) -> None:
    TokenizerConfig(**(dict(OmegaConf.load(CONF / f"tokenizer/{kind}.yaml")) | {"path": "FOLDER"}))


@pytest.mark.parametrize("script", ENTRY_POINTS)
def test_every_key_has_a_line_of_documentation(script: str) -> None:
    conf = composed_script(script)
    rows = [row for prefix, cls in groups(ENTRY_POINTS[script]) for row in keys(cls, prefix, conf)]  # or it raises
    assert rows and all(meaning for *_, meaning in rows)


def test_a_default_is_that_of_the_command_and_not_of_the_dataclass() -> None:
    shown = keys(TransformerConfig, "model.", composed_script("src/train.py"))
    defaults = {name: default for name, _, default, _ in shown}
    assert (defaults["model.attention"], defaults["model.recompute"]) == ("`auto`", "`auto`")
    assert defaults["model.num_layers"] == "-"  # of the chosen model


def test_the_committed_reference_is_current() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == format_reference(), "make reference"
