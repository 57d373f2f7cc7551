"""Appendix C, scaled down: samples of a trained GPT for five prompts, with the seeds that reproduce them.

    python src/train.py data=local data.path=articles.jsonl data.validation_path=held_out.jsonl ...
    python analysis/zero_shot/appendix_c.py --run outputs/gpt_tiny/RUN --trained-on "description of the text"

Samples from the newest checkpoint of a run folder, and writes a record and the texts as Markdown. Each sample is
reproduced by `python src/generate.py ckpt=RUN prompt=... temperature=0.8 top_p=0.9 max_new_tokens=150 seed=1234`. The
committed record also has the speed-up of the key-value cache, from the script of its commit.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from lmscale.checkpoint import read_metadata
from lmscale.config.generate import Sampling
from lmscale.data.tokenizer import END_OF_TEXT
from lmscale.evaluation.generation import Generator
from lmscale.evaluation.loading import LoadedModel, load_model
from lmscale.evaluation.prompts import PromptReader
from lmscale.parallel import ParallelContext
from lmscale.results import new_record, write_record

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "analysis" / "zero_shot" / "records"
PROMPTS = (
    "Tom was a student in a small school. One day, his teacher",
    "Dear Mary,\nThank you for your letter. I am writing to tell you about",
    "Many people in China like to drink tea.",
    "A long time ago, there was an old man who lived",
    "Why is it important to learn English? First,",
)
SAMPLING, SEED, NUM_NEW = Sampling(temperature=0.8, top_p=0.9), 1234, 150


def sample(loaded: LoadedModel) -> list[dict]:
    """Draw the samples; each is independent of the others in its batch."""
    generator = Generator(loaded.model, SAMPLING, loaded.tokenizer.inner.token_to_id(END_OF_TEXT), SEED)
    reader = PromptReader(loaded.tokenizer, loaded.config, NUM_NEW)
    rows = [row for i, text in enumerate(PROMPTS) for row in reader.rows(reader.read(text, f"prompt {i + 1}"))]
    generator.extend(rows)
    return [
        {"prompt": row.prompt.text, "seed": SEED, "sample": row.sample, "finish": row.finish}
        | {"num_tokens": len(row.tokens), "text": loaded.tokenizer.decode(row.tokens)}
        for row in rows
    ]


def markdown(record: dict) -> str:
    """Format the samples, with the model and the settings above them."""
    config, metrics = record["config"], record["metrics"]
    model, training = config["model"], config["training"]
    lines = [
        "# Appendix C, scaled down: samples of a trained GPT",
        "",
        f"A GPT of {model['num_layers']} layers x {model['hidden_size']} (vocabulary {model['vocab_size']}), trained "
        f"on {config['trained_on']}: {training['steps']:,} steps of {training['tokens_per_step']:,} tokens, validation "
        f"perplexity {metrics['validation_perplexity']['value']:.1f}. The paper's GPT-2 models have 355 M to 8.3 B "
        "parameters and are trained on 157 billion tokens (300,000 steps of 512 x 1,024).",
        "",
        f"Temperature {config['temperature']}, top-p {config['top_p']}, at most {NUM_NEW} tokens, seed {SEED}, "
        "sample 0 of each prompt (in brackets). The samples are not selected.",
    ]
    for number, one in enumerate(record["samples"], start=1):
        end = "end of text" if one["finish"] == "end_of_text" else f"cut at {one['num_tokens']} tokens"
        lines += ["", f"## {number}", "", "```text", f"[{one['prompt']}]{one['text']}", "```", "", f"({end})"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Draw the samples and write the outputs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="run folder of a trained GPT")
    parser.add_argument("--trained-on", required=True, help="description of the training text")
    parser.add_argument("--output", type=Path, default=RECORDS, help="folder of appendix_c.json and appendix_c.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(options.run, ParallelContext())
    run = read_metadata(loaded.path).run
    own = json.loads((options.run / "record.json").read_text(encoding="utf-8"))["metrics"]
    training = {
        "steps": loaded.step,
        "tokens_per_step": run["global_batch_size"] * run["data"]["seq_length"],
        "seed": run["seed"],
        "optimizer": run["optimizer"],
        "precision": run["precision"]["dtype"],
    }
    metrics = {"validation_loss": own["val/loss"], "validation_perplexity": own["val/perplexity"]}
    metrics["train_time"] = own["train_time"]
    config = {
        "model": loaded.config.to_dict(),
        "checkpoint": loaded.checkpoint_id,
        "tokenizer": loaded.tokenizer.fingerprint,
        "trained_on": options.trained_on,
        "training": training,
        "temperature": SAMPLING.temperature,
        "top_p": SAMPLING.top_p,
        "max_new_tokens": NUM_NEW,
    }
    layout = {"tp_size": 1, "dp_size": 1, "threads_per_rank": 1}
    record = new_record("appendix_c", "scaled_down", config, SEED, metrics, device="cpu", layout=layout)
    record["samples"] = sample(loaded)
    write_record(record, options.output / "appendix_c.json")
    (options.output / "appendix_c.md").write_text(markdown(record), encoding="utf-8")
    print(markdown(record))
    print(json.dumps({name: entry["value"] for name, entry in metrics.items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
