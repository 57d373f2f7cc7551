"""Every number of the paper's tables and figures as an entry of the ledger; `text_entries` has those of its text.

The values are in `ledger` and `scaling`. To fill an entry with a new measurement, a record names a metric by the
entry's id.
"""

from collections.abc import Iterator

from ..config import TransformerConfig
from ..planner.params import count_parameters
from . import commands
from . import ledger as paper
from .evidence import (
    NOT_RUN,
    SCALED_DOWN,
    SETTING,
    Context,
    Entry,
    Finder,
    Found,
    anchored,
    asked,
    combined,
    counted,
    first_of,
    not_run,
    own_metric,
    recorded,
    setting,
    table_row,
)
from .norm_order import STATES
from .scaling import CELLS, study_model
from .scaling_figures import configuration, figure_cells, paper_petaflops
from .text_entries import text_entries

_LINEAR, _SPEED_UP, _MILLIONS = "% of linear scaling", "speed-up", "million parameters"
_READ = {"text": paper.PRINTED, "figure": paper.READ_OFF}
_NO_GPT = "needs the corpus and {} GPUs; not trained"
_NO_BERT = "needs the pretrained {} BERT"
_NO_RECORD = "not trained, and no record has a metric of this name"
_QUOTED = "a result of others that the paper quotes"
_SHAPE = {"num_layers": "layers", "hidden_size": "hidden size", "num_attention_heads": "heads"}
_PLACES = ("table", "figure", "section", "appendix", "blog")
_TABLE_6_KEYS = {"global_batch_size": "sequences", "lr": "learning rate", "num_epochs": "epochs"}
_BERTS = ("336M", "1.3B", "3.9B")  # of Tables 4, 5 and 6
_SMALL_DEPTHS = {"336M": 12, "752M": 24}  # layers of the norm-order study that stand for 24 and 36
_SEEN_BEFORE = "all-MiniLM-L6-v2, which its makers trained on MultiNLI, Quora pairs and SQuAD 2.0 too; part of the set"
_FROM_FIGURE_5 = f"{paper.INFERRED}: Figure 5 times 39 TFLOP/s and the GPUs; it counts parameters, some % beside FLOPs"
_SMALL_RACE = "all-MiniLM-L6-v2; one passage in four of the development set, 128 tokens"


def all_entries() -> tuple[Entry, ...]:
    """The whole ledger: tables, figures, sections, appendices, the blog, each by its number."""
    tables = (_table_1, _table_2, _table_3, _table_4, _table_5, _table_6, _scaling_tables)
    parts = (*tables, _scaling_figures, _figures, text_entries)
    return tuple(sorted((entry for part in parts for entry in part()), key=_place))


def _place(entry: Entry) -> tuple[int, str]:
    """Where an entry stands; what is of one place keeps its order."""
    place = entry.id.split("/")[0]
    return _PLACES.index(place.split("_")[0]), place


def _shape(place: str, model: str, size: tuple[int, int, int], command: str, origin: str) -> Iterator[Entry]:
    for (key, unit), value in zip(_SHAPE.items(), size, strict=True):
        yield Entry(f"{place}/{model}/{key}", value, unit, setting(f"model/{model}.yaml", key), command, origin)


def _table_1() -> Iterator[Entry]:
    for size, row in paper.STUDY_MODELS.items():
        model, heads = f"gpt_{size.lower()}", row.size[2]
        gpus = row.tp_size * paper.DATA_RANKS
        alone = commands.study(size, heads, row.tp_size, 1)
        wide = commands.study(size, heads, row.tp_size, paper.DATA_RANKS)
        yield from _shape("table_1", model, row.size, alone, paper.PRINTED)
        found = counted(
            "lmscale.planner.params", lambda size=row.size: count_parameters(study_model(*size)).total / 1e9
        )
        yield Entry(f"table_1/{model}/parameters", row.parameters, "billion parameters", found, alone)
        yield Entry(f"table_1/{model}/mp_gpus", row.tp_size, "GPUs", asked(alone, "parallel.tp_size"), alone)
        both = asked(wide, "parallel.tp_size", "parallel.dp_size")
        yield Entry(f"table_1/{model}/mp_dp_gpus", gpus, "GPUs", both, wide)


def _table_2() -> Iterator[Entry]:
    for size, row in paper.GPT_MODELS.items():
        model, command = commands.gpt_name(size), commands.train_gpt(size)
        label = f"{size}, {row.num_gpus} GPUs"
        place = f"table_2/{model}"
        yield from _shape("table_2", model, row.size, command, paper.PRINTED)
        yield Entry(
            f"{place}/head_size",
            row.head_size,
            "of a head",
            combined(f"model/{model}.yaml", "hidden_size", "/", "num_attention_heads"),
            command,
        )
        yield Entry(
            f"{place}/parameters", row.parameters, _MILLIONS, table_row("Table 2", label, _MILLIONS, ""), command
        )
        gpus = asked(command, "parallel.tp_size", "parallel.dp_size")
        yield Entry(f"{place}/gpus", row.num_gpus, "GPUs", gpus, command)
        days = table_row("Table 2", label, "days an epoch", "")
        yield Entry(f"{place}/days", row.days, "days an epoch", days, command)


def _table_3() -> Iterator[Entry]:
    for task, unit in (("wikitext103", "WikiText103 perplexity"), ("lambada", "LAMBADA accuracy, %")):
        small = _small_zero_shot(unit)
        for size, row in paper.GPT_MODELS.items():
            found = table_row("Table 3", size, unit, _NO_GPT.format(row.num_gpus))
            found = first_of(found, small, found) if size == "355M" else found  # the smallest stands for our small one
            entry_id = f"table_3/{commands.gpt_name(size)}/{task}"
            yield Entry(entry_id, getattr(row, task), unit, own_metric(entry_id, found), commands.zero_shot(task, size))
        yield Entry(f"table_3/previous_best/{task}", paper.PREVIOUS_BEST[task], unit, not_run(_QUOTED), "")


def _small_zero_shot(unit: str) -> Finder:
    """The first measurement of Table 3 on a smaller model or another file."""

    def find(context: Context) -> Found:
        rows = context.tables["Table 3"]
        rows = rows[(rows["unit"] == unit) & (rows["evidence"] == SCALED_DOWN)]
        if rows.empty:
            return Found(NOT_RUN, "")
        row = rows.iloc[0]
        return Found(SCALED_DOWN, f"`{row['record']}`: {row['configuration']}", row["ours"])

    return find


def _table_4() -> Iterator[Entry]:
    for size in _BERTS:
        row, model = paper.BERT_MODELS[size], f"bert_{size.lower()}"
        command = commands.train_bert(size, row.num_gpus)
        yield from _shape("table_4", model, row.size, command, paper.PRINTED)
        yield Entry(f"table_4/{model}/parameters", row.parameters, _MILLIONS, _bert_parameters(row), command)
        gpus = asked(command, "parallel.tp_size", "parallel.dp_size")
        yield Entry(f"table_4/{model}/gpus", row.num_gpus, "GPUs", gpus, command)


def _bert_parameters(row: paper.BERTModel) -> Finder:
    config = TransformerConfig("bert", *row.size, paper.BERT_VOCABULARY, 512)
    return counted("lmscale.planner.params", lambda: count_parameters(config).total / 1e6)


def _table_5() -> Iterator[Entry]:
    for size, row in paper.BERT_MODELS.items():
        name = size.lower().replace(" ", "_")
        own = size.split()[0] in _BERTS
        model = f"bert_{name}" if own else name
        if row.token_ratio is not None:
            found = _token_ratio(size) if own else not_run(_QUOTED)
            command = commands.train_bert(size, row.num_gpus) if own else ""
            yield Entry(f"table_5/{model}/trained_tokens", row.token_ratio, "of 336M's", found, command)
        for (metric, unit), value in zip(paper.TABLE_5_METRICS.items(), row.table_5, strict=True):
            if value is None:
                continue
            task, entry_id = metric.split("/")[0], f"table_5/{model}/{metric}"
            if not own:
                yield Entry(entry_id, value, unit, not_run(_QUOTED), "")
                continue
            found = table_row("Table 5", size, unit, _NO_BERT.format(size.split()[0]))
            found = first_of(found, _small_bert(metric), found) if size == "336M" else found
            make = commands.ensemble if size.endswith("ensemble") else commands.finetune
            yield Entry(entry_id, value, unit, own_metric(entry_id, found), make(task, size.split()[0]))


def _small_bert(metric: str) -> Finder:
    """The small BERT's median over its seeds; of RACE it has the development set."""
    task = metric.split("/")[0]
    of_race = task == "race"
    return recorded(
        lambda name: name.startswith(f"finetune_small/{task}_pretrained"),
        (metric.removesuffix("_test"),) if of_race else (metric,),
        _SMALL_RACE if of_race else _SEEN_BEFORE,
        "",
        "RACE development set, %" if of_race else None,
    )


def _token_ratio(size: str) -> Finder:
    """Steps over 336M's, at the same batch."""

    def find(context: Context) -> Found:
        steps = context.setting("recipe/base/paper_bert.yaml", "trainer/max_steps")
        file = f"recipe/bert_{size.lower()}.yaml"
        own = context.settings[file].get("trainer", {}).get("max_steps", steps)
        return Found(SETTING, f"`conf/{file}`, `trainer.max_steps` over that of 336M", own / steps)

    return find


def _table_6() -> Iterator[Entry]:
    for task, rows in paper.TABLE_6.items():
        for size, values in zip(_BERTS, rows, strict=True):
            for (key, unit), value in zip(_TABLE_6_KEYS.items(), values, strict=True):
                found = setting(f"finetune/task/{task}.yaml", f"table_6/{size.lower()}/{key}")
                command = commands.finetune(task, size, "finetune_search")
                entry_id = f"table_6/{task}/bert_{size.lower()}/{key}"
                yield Entry(entry_id, value, unit, found, command, paper.RECONSTRUCTED)


def _scaling_tables() -> Iterator[Entry]:
    """Tables 7 and 8."""
    first = commands.study("1.2B", paper.STUDY_MODELS["1.2B"].size[2], 1, 1)
    yield Entry("table_8/gpt_1.2b/1_gpu", 1.0, _SPEED_UP, anchored("by definition", lambda _: 1.0), first)
    for cell in (cell for cell in CELLS if cell.table != "Figure 5"):
        command = commands.study(cell.size, cell.heads, cell.tp_size, cell.dp_size)
        place = f"{cell.table.lower().replace(' ', '_')}/gpt_{cell.size.lower()}/{cell.label.replace(' ', '_').lower()}"
        is_speed_up = cell.table == "Table 8"
        unit = _SPEED_UP if is_speed_up else _LINEAR
        value = round(cell.paper * cell.tp_size / 100, 6) if is_speed_up else cell.paper
        found = table_row(cell.table, f"{cell.size}, {cell.label}", unit, "")
        yield Entry(place, value, unit, found, command, _READ[cell.certainty])
        if not is_speed_up:
            file = f"model/{commands.study_name(cell.size, cell.heads)}.yaml"
            head_size = combined(file, "hidden_size", "/", "num_attention_heads")
            width = paper.STUDY_MODELS[cell.size].size[1]
            yield Entry(f"{place}/head_size", width // cell.heads, "of a head", head_size, command)


def _scaling_figures() -> Iterator[Entry]:
    """Figures 1 and 5."""
    for cell in figure_cells():
        command = commands.study(cell.size, cell.heads, cell.tp_size, cell.dp_size)
        row = configuration(cell)
        place = f"{'mp' if cell.dp_size == 1 else 'mp_dp'}/{row.split(', ')[1].replace(' ', '_').lower()}"
        found = table_row("Figure 5", row, _LINEAR, "")
        yield Entry(f"figure_5/{place}", cell.paper, _LINEAR, found, command, _READ[cell.certainty])
        petaflops, printed = paper_petaflops(cell)
        origin = paper.PRINTED if printed else _FROM_FIGURE_5
        found = table_row("Figure 1", row, "PFLOP/s", "")
        yield Entry(f"figure_1/{place}", petaflops, "PFLOP/s", found, command, origin)


def _figures() -> Iterator[Entry]:
    """Figures 6 and 7."""
    best, trend = "figure_6/gpt_8.3b_24heads/validation_perplexity", "figure_6/trend"
    found = own_metric(best, not_run(_NO_GPT.format(512)))
    yield Entry(best, paper.BEST_VALIDATION_PERPLEXITY, "perplexity", found, commands.train_gpt("8.3B"))
    law = ("parameters/plain/b",)
    small = recorded("model_size.json".__eq__, law, "small GPTs", _NO_RECORD, "exponent b of loss = a x parameters^-b")
    found = own_metric(trend, small)
    yield Entry(trend, "falls with size", "perplexity", found, commands.train_gpt("8.3B"))
    for size, order, words in paper.FIGURE_7:
        model = f"bert_{size.lower()}"
        entry_id, depth = f"figure_7/{model}/{order}", _SMALL_DEPTHS[size]
        command = commands.figure_7(size, order)
        yield Entry(entry_id, words, "training loss", own_metric(entry_id, _small_norm_order(depth, order)), command)
    command = commands.train_bert("752M", 128)
    yield from _shape("figure_7", "bert_752m", paper.BERT_752M.size, command, paper.INFERRED)
    parameters = _bert_parameters(paper.BERT_752M)
    yield Entry("figure_7/bert_752m/parameters", paper.BERT_752M.parameters, _MILLIONS, parameters, command)


def _small_norm_order(depth: int, order: str) -> Finder:
    """The norm-order study at a depth that stands for the paper's, scaled start: how its runs ended, and their loss."""

    def find(context: Context) -> Found:
        metrics = context.records.get("norm_order.json", {"metrics": {}})["metrics"]
        place = f"{depth}_layers/scaled"
        if f"{place}/{order}/learned" not in metrics:
            return Found(NOT_RUN, _NO_RECORD)
        counts = {state: metrics[f"{place}/{order}/{state}"]["value"] for state in STATES}
        ended = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        loss, rate = metrics.get(f"{place}/{order}"), metrics[f"{place}/lr_{order}"]["value"]
        end = "" if loss is None else f": {loss['value']:.3f} {loss['unit']}"
        what = f"runs of a small BERT of {depth} layers, learning rate {rate:g}"
        return Found(SCALED_DOWN, f"`norm_order.json`: {what}", f"{ended}{end}")

    return find
