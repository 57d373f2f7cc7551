"""Prepare a corpus: clean, deduplicate, remove test sets, tokenize; every key: conf/prepare_data.yaml."""

import lmscale.cli.ctrl_c  # noqa: F401

# isort: split
import shutil

from lmscale.cli.hydra_main import run_hydra_main, run_task
from lmscale.cli.next_command import command
from lmscale.config.corpus import PrepareConfig


def prepare(values: dict) -> None:
    """Build the config, open the work folder, run the stages, and print a summary."""
    config = PrepareConfig.from_dict(values)
    # datatrove and pyarrow take seconds to import: only after the cheap checks.
    from lmscale.corpus.finalizing import summarize
    from lmscale.corpus.inputs import list_skipped
    from lmscale.corpus.opening import open_work_folder
    from lmscale.corpus.running import run_stages

    try:
        work = open_work_folder(config)
    except OSError as error:
        rule = "a folder that can be made and written"
        raise ValueError(f"`output` must be {rule}, but {error.filename or config.output}: {error.strerror}") from None
    try:
        for note in list_skipped(config.sources):
            print(f"note: {note}", flush=True)
        if not run_stages(work):
            print(f"submitted; {work.output / 'manifest.json'} appears when the last job is done")
            return
        print(summarize(work.output))
        model = f"{config.architecture}_tiny"
        print(f"train: {command('src/train.py', model=model, data='indexed', data__path=work.output)}")
        if not config.keep_work:
            shutil.rmtree(work.root)
    except OSError as error:  # the disk is full, a folder is not writable
        raise ValueError(f"the preparation stopped; the same command continues it: {error}") from error


if __name__ == "__main__":
    run_hydra_main(lambda cfg: run_task(prepare, cfg))
