"""Table 3, scaled down: train a GPT on RACE's articles, then evaluate it on WikiText-103's validation file and LAMBADA.

    python analysis/zero_shot/small.py --race race/ --wikitext wiki.valid.tokens --lambada lambada_test.jsonl

The windows are the paper's (1,024 tokens, 32 new targets each). The model is smaller (4 layers x 256) and trained on 2
million tokens. Three commands run one after another in `--folder`; finished ones are skipped. The two records, which
include the training data, are `zero_shot_small_*.json` in `--output`.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `analysis`, which is not installed

from analysis.running import ROOT, run_python
from lmscale.results import write_record

RECORDS = ROOT / "analysis" / "zero_shot" / "records"
TRAINED_ON = "2 million tokens of the 25,137 articles of RACE's training set (40 MB of English for learners)"
TRAINING = (
    "model=gpt_tiny",
    "name=gpt_race",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
    "model.max_position_embeddings=1024",
    "data.text_field=article",
    "data.seq_length=1024",
    "tokenizer.vocab_size=8192",
    "micro_batch_size=2",
    "global_batch_size=4",
    "optimizer.lr=0.002",
    "schedule.warmup_steps=40",
    "trainer.max_steps=500",
    "trainer.validate_every_steps=250",
    "trainer.num_validation_samples=64",
    "trainer.progress_bar=false",
    "trainer.num_threads=1",
    "checkpoint.save_every_steps=250",
    "logger.tensorboard=false",
    "precision=bf16",
    "resume=auto",
)
KEPT = ("data", "seed", "global_batch_size", "optimizer", "schedule", "precision")


def run_script(name: str, *overrides: str) -> None:
    """Run an entry script; its output goes to the terminal."""
    print("python", f"src/{name}", *overrides, flush=True)
    run_python(f"src/{name}", *overrides)


def train(race: Path, folder: Path) -> Path:
    """Train the model unless it is trained already; returns its run folder."""
    run = folder / "gpt_race"
    if not (run / "record.json").is_file():
        paths = (f"data.path={race}/race_train.jsonl.gz", f"data.validation_path={race}/race_dev.jsonl.gz")
        folders = (f"data.cache_dir={folder}/cache", f"hydra.run.dir={run}")
        run_script("train.py", "data=local", *paths, *folders, *TRAINING)
    return run


def evaluate(task: str, path: Path, run: Path, folder: Path) -> dict:
    """Run one evaluation unless it has a record; returns the record with the training configuration added."""
    if not (folder / task / "record.json").is_file():
        options = ("task.stop_word_filter=true",) if task == "lambada" else ()
        names = (f"task={task}", f"task.path={path}", f"ckpt={run}", f"hydra.run.dir={folder / task}")
        run_script("zero_shot.py", *names, *options)
    record = json.loads((folder / task / "record.json").read_text(encoding="utf-8"))
    trained = json.loads((run / "record.json").read_text(encoding="utf-8"))
    own = trained["metrics"]
    record["config"]["training"] = {key: trained["config"][key] for key in KEPT} | {"trained_on": TRAINED_ON}
    record["metrics"] |= {f"training/{name}": own[name] for name in ("val/loss", "val/perplexity", "train_time")}
    return record


def main() -> int:
    """Train, evaluate on both tasks and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--race", type=Path, required=True, help="folder of race_train.jsonl.gz, race_dev.jsonl.gz")
    parser.add_argument("--wikitext", type=Path, required=True, help="wiki.valid.tokens of WikiText-103")
    parser.add_argument("--lambada", type=Path, required=True, help="LAMBADA's passages as JSON lines")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "zero_shot_small", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=RECORDS)
    options = parser.parse_args()
    run = train(options.race, options.folder)
    for task, path in (("lambada", options.lambada), ("wikitext103", options.wikitext)):
        record = evaluate(task, path, run, options.folder)
        write_record(record, options.output / f"zero_shot_small_{task}.json")
        print(options.output / f"zero_shot_small_{task}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
