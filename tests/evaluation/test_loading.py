"""Models loaded for evaluation: exactly the checkpoint's weights, at any layout, or an error."""

import errno
import json
import os
import re
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import flip_a_byte
from crafted import save_gpt
from ranks import make_context, run_ranks, torchrun_rank
from sharding import random_model, small_config

from lmscale.checkpoint import CheckpointError
from lmscale.config import Layout, TransformerConfig
from lmscale.config.generate import GenerateConfig, GenerateTokenizer
from lmscale.data.tokenizer import Tokenizer, choose_tokenizer, train_tokenizer
from lmscale.evaluation import ranks
from lmscale.evaluation.loading import check_model, load_requested_tokenizer
from lmscale.evaluation.ranks import evaluation_groups, run_on_rank
from lmscale.hugging_face.conversion import export_hugging_face, import_hugging_face
from lmscale.models import BERT, GPT
from lmscale.parallel import ParallelContext
from lmscale.parallel.shared_memory import RankGoneError, SharedMemoryError
from lmscale.runtime.lost_rank import LostRank
from lmscale.runtime.ranks import AgreedError, Ranks
from lmscale.runtime.watchdog import Watchdog
from lmscale.trained_model import describe_checkpoint, load_model, load_saved_tokenizer

PLAIN = ParallelContext()
TEXTS = ["some text to fit a tokenizer, one, two, three and more words of many kinds"] * 5


def trained(vocab_size: int) -> Tokenizer:
    return Tokenizer(train_tokenizer(TEXTS, "gpt", vocab_size, "size"))


def saved_tokenizer(path: Path) -> Tokenizer | None:
    config, folder = describe_checkpoint(path)
    return load_saved_tokenizer(folder, config)


def gpt(config: TransformerConfig | None = None) -> torch.nn.Module:
    model = random_model(config or small_config("gpt"), PLAIN)
    with torch.no_grad():
        model.transformer.word_embedding.weight[model.config.vocab_size :] = 0.0
    return model


def same_weights(loaded: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Bitwise equal to the saved weights, in fp32."""
    ours, theirs = dict(loaded.named_parameters()), dict(model.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n].float().to(ours[n].dtype)) for n in ours)


@pytest.mark.parametrize("architecture, kind, norm_order", [("gpt", GPT, "pre"), ("bert", BERT, "post")])
def test_every_weight_equals_the_checkpoints_at_any_layout(tmp_path, architecture, kind, norm_order) -> None:
    model = random_model(small_config(architecture, norm_order=norm_order, attention_dropout=0.3), PLAIN)
    for tp_size in (1, 4):
        path = save_gpt(tmp_path / str(tp_size), model, tp_size=tp_size)
        loaded = load_model(path, PLAIN, torch.float64)
        assert isinstance(loaded.model, kind) and same_weights(loaded.model, model)
        assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
        assert (loaded.step, loaded.path, saved_tokenizer(path)) == (7, path, None)


def test_a_run_folder_denotes_its_latest_checkpoint_and_tokenizer(tmp_path) -> None:
    tokenizer = trained(300)
    save_gpt(tmp_path, gpt(), tokenizer, step=9)
    newest = random_model(small_config("gpt"), PLAIN, seed=8)
    path = save_gpt(tmp_path, newest, tokenizer, step=11)
    (tmp_path / "config.json").write_text('{"name": "of the run, not of transformers"}')
    loaded = load_model(tmp_path, PLAIN)
    assert loaded.path == path and same_weights(loaded.model, newest)
    assert saved_tokenizer(tmp_path).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_a_hugging_face_folder_gives_the_same_model_tokenizer_and_identity(tmp_path) -> None:
    tokenizer = trained(300)
    model = gpt(small_config("gpt", vocab_size=tokenizer.vocab_size, vocab_multiple=1024))
    path = save_gpt(tmp_path / "ours", model, tokenizer)
    published = export_hugging_face(path, tmp_path / "published")
    ours, theirs = load_model(path, PLAIN, torch.float64), load_model(published, PLAIN, torch.float64)
    assert same_weights(theirs.model, ours.model)
    assert saved_tokenizer(published).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert (theirs.path, theirs.step, theirs.checkpoint_id) == (published, 0, ours.checkpoint_id)


def test_an_unusable_temporary_folder_is_an_error_of_all_ranks(tmp_path, monkeypatch) -> None:
    published = export_hugging_face(save_gpt(tmp_path / "ours", gpt()), tmp_path / "published")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(AgreedError, match="No such file or directory: .*/none/lmscale_import_"):
        load_model(published, PLAIN)


def test_the_identity_depends_on_the_weights_and_not_on_the_path(tmp_path) -> None:
    path = save_gpt(tmp_path / "one", gpt())
    moved = shutil.copytree(path, tmp_path / "two" / path.name)
    other = save_gpt(tmp_path / "three", random_model(small_config("gpt"), PLAIN, seed=8))
    ids = [load_model(each, PLAIN).checkpoint_id for each in (path, moved, other)]
    assert ids[0] == ids[1] != ids[2]


def loaded_shards(rank: int, path: str, published: str) -> list[bool]:
    os.environ |= torchrun_rank(rank, dist.get_world_size())  # one rank converts for all
    found, ranks_of_all = [], Ranks(rank, dist.get_world_size())
    for tp_size, dp_size, sources in ((2, 2, (path, published)), (4, 1, (path,)), (1, 4, (path,))):
        context = make_context(tp_size, dp_size)
        for source in sources:
            loaded = load_model(source, context, torch.float64, ranks=ranks_of_all)
            expected = random_model(loaded.model.config, context)
            names = [n for n, p in expected.named_parameters() if "word_embedding" not in n]
            ours, theirs = dict(loaded.model.named_parameters()), dict(expected.named_parameters())
            found += [torch.equal(ours[name], theirs[name].float().double()) for name in names]
    for broken, message in ((f"{path}/none", "must be a checkpoint, a run folder or"), (f"{path}_bad", "is damaged")):
        with pytest.raises(ValueError, match=message):
            load_model(broken, context, ranks=ranks_of_all)
    return found


def test_ranks_load_their_shards_and_all_raise_on_damage(tmp_path) -> None:
    model = gpt(small_config("gpt", vocab_multiple=1024))
    path = save_gpt(tmp_path, model, tp_size=4)
    published = export_hugging_face(path, tmp_path / "published")
    bad = shutil.copytree(path, path.with_name(f"{path.name}_bad"))
    flip_a_byte(sorted(bad.glob("*.safetensors"))[2])  # of one rank's share
    for found in run_ranks(loaded_shards, 4, str(path), str(published)):
        assert len(found) > 100 and all(found)


def test_a_checkpoint_that_does_not_match_its_model_raises(tmp_path) -> None:
    model = gpt()
    model.config = small_config("gpt", max_position_embeddings=12)
    path = save_gpt(tmp_path, model)
    rule = r"model/transformer.position_embedding must be \(12, 24\), sharded along None, but is \(13, 24\)"
    with pytest.raises(AgreedError, match=rule):
        load_model(path, PLAIN)


def test_the_ranks_of_a_context_must_be_given(tmp_path) -> None:
    with pytest.raises(ValueError, match="^`ranks` must be the 4 of `context`, but are 1$"):
        load_model(tmp_path, ParallelContext(tp_size=2, dp_size=2))


def test_a_path_without_model_raises(tmp_path) -> None:
    (tmp_path / "file.bin").write_bytes(b"weights")
    (tmp_path / "empty").mkdir()
    for name, message in (("none", "does not exist"), ("file.bin", "is a file"), ("empty", "not a checkpoint")):
        with pytest.raises(AgreedError, match=message):
            load_model(tmp_path / name, PLAIN)


def test_a_damaged_latest_checkpoint_is_not_replaced_by_an_older_one(tmp_path) -> None:
    save_gpt(tmp_path, gpt(), step=3)
    path = save_gpt(tmp_path, gpt(), step=5)
    next(path.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(AgreedError, match="step_5.ckpt.*must have .* bytes, but has 0"):
        load_model(tmp_path, PLAIN)


def test_the_model_is_described_without_its_weights(tmp_path) -> None:
    path = save_gpt(tmp_path / "ours", gpt(), trained(300))
    published = export_hugging_face(save_gpt(tmp_path / "plain", gpt()), tmp_path / "published")
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    assert describe_checkpoint(path) == (small_config("gpt"), path.parent / "tokenizer")
    config, folder = describe_checkpoint(published)
    assert (config.num_layers, config.vocab_size, folder) == (2, 99, published)
    about = json.loads((published / "config.json").read_text())
    del about["model_type"], about["architectures"]  # as in files of 2019
    (published / "config.json").write_text(json.dumps(about))
    assert describe_checkpoint(published) == (config, published)
    weights = published / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="`ckpt` must have weights that can be read, but model.safetensors"):
        describe_checkpoint(published)


def test_a_wrong_world_size_raises(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "", "LOCAL_RANK": ""})
    assert evaluation_groups(Layout()) == (PLAIN, Ranks())
    monkeypatch.setattr(os, "environ", torchrun_rank(0, 3))
    with pytest.raises(ValueError, match="`parallel` must be a grid of the 3 ranks .*, but is one of 4$"):
        evaluation_groups(Layout(tp_size=2, dp_size=2))


def test_a_tokenizer_must_match_the_checkpoint(tmp_path) -> None:
    own = trained(280)
    other = Tokenizer(train_tokenizer(["words of another text that has nothing of the first"] * 5, "gpt", 280, "size"))
    model = small_config("gpt", vocab_size=own.vocab_size)
    assert choose_tokenizer(None, own, model, "ckpt") is own
    assert choose_tokenizer(own, None, model, "ckpt") is own
    assert choose_tokenizer(trained(280), own, model, "ckpt").fingerprint == own.fingerprint
    with pytest.raises(ValueError, match="`tokenizer` must be given .* none is saved with ckpt"):
        choose_tokenizer(None, None, model, "ckpt")
    with pytest.raises(
        ValueError, match="`tokenizer.path` must be that of the checkpoint, but a different one is saved"
    ):
        choose_tokenizer(other, own, model, "ckpt")
    large = small_config("gpt", vocab_size=50_257)
    with pytest.raises(ValueError, match=f"whose model has 50257 ids, but it has {own.vocab_size}"):
        choose_tokenizer(own, None, large, "ckpt")
    with pytest.raises(ValueError, match=f"whose model has 99 ids, but it has {own.vocab_size}"):
        choose_tokenizer(own, None, small_config("gpt"), "ckpt")


def test_a_model_may_have_more_ids_than_the_tokenizer_of_its_run(tmp_path) -> None:
    tokenizer = trained(300)
    config = small_config("gpt", vocab_size=tokenizer.vocab_size + 33, vocab_multiple=1024)
    path = save_gpt(tmp_path / "ours", gpt(config), tokenizer)
    model, found = check_model(GenerateConfig(ckpt=str(path), prompt="x"))
    assert (model.vocab_size, found.fingerprint) == (config.vocab_size, tokenizer.fingerprint)
    published = export_hugging_face(path, tmp_path / "published")
    back = import_hugging_face(published, tmp_path / "back")
    for folder in (published, back):
        model, found = check_model(GenerateConfig(ckpt=str(folder), prompt="x"))
        assert (model.vocab_size, found.inner.get_vocab()) == (config.vocab_size, tokenizer.inner.get_vocab())


@pytest.mark.parametrize(
    "vocab_size, fits",
    [(50_257, True), (50_264, True), (50_304, True), (51_200, True), (50_272, False), (50_258, False), (50_256, False)],
)
def test_a_tokenizer_from_elsewhere_may_lack_the_ids_up_to_a_round_number(shared_data, vocab_size, fits) -> None:
    gpt2 = load_requested_tokenizer(GenerateTokenizer(path=str(shared_data / "gpt2-bpe")))
    model = small_config("gpt", vocab_size=vocab_size)
    if fits:
        assert choose_tokenizer(gpt2, None, model, "ckpt") is gpt2
        return
    with pytest.raises(ValueError, match=f"whose model has {vocab_size} ids, but it has 50257"):
        choose_tokenizer(gpt2, None, model, "ckpt")


def test_the_same_tokenizer_in_another_file_format_matches(shared_data, tmp_path) -> None:
    given = load_requested_tokenizer(GenerateTokenizer(path=str(shared_data / "gpt2-bpe")))
    assert load_requested_tokenizer(GenerateTokenizer()) is None
    given.inner.save(str(tmp_path / "tokenizer.json"))
    saved = load_requested_tokenizer(GenerateTokenizer(path=str(tmp_path)))
    model = small_config("gpt", vocab_size=50_257)
    assert choose_tokenizer(given, saved, model, "ckpt") is given
    with pytest.raises(ValueError, match="`tokenizer.path` must be a file or a folder, but .*none does not exist"):
        load_requested_tokenizer(GenerateTokenizer(path=str(tmp_path / "none")))


@pytest.mark.parametrize(("error", "ends"), [(ValueError("on every rank"), True), (RuntimeError("on one"), False)])
def test_the_process_group_is_ended_only_with_all_ranks(monkeypatch, capsys, error: Exception, ends: bool) -> None:
    """With NCCL the end waits for the other ranks, which may be inside a collective."""
    ended = []

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ranks, "evaluation_groups", lambda *_: (ParallelContext(tp_size=2), Ranks()))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    if ends:
        assert run_on_rank(fail, "cpu", Layout(tp_size=2)) == 2 and capsys.readouterr().err == "error: on every rank\n"
    else:
        with pytest.raises(RuntimeError, match="on one"):
            run_on_rank(fail, "cpu", Layout(tp_size=2))
    assert bool(ended) == ends


def test_a_rank_that_waits_for_another_one_ends_at_the_time_limit(monkeypatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, where, seconds: ended.append(where))
    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(ranks, "evaluation_groups", lambda *_: (ParallelContext(tp_size=2), Ranks(size=2)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)

    def work(place: ranks.RankPlace) -> int:
        for _ in range(8):
            time.sleep(0.1)
            place.watchdog.mark("a batch")
        assert ended == []
        time.sleep(1)
        return 0

    assert run_on_rank(work, "cpu", Layout(tp_size=2)) == 0
    assert set(ended) == {"a batch"}


def test_a_rank_that_has_lost_another_one_ends_in_one_line(monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise RankGoneError("", 1)

    monkeypatch.setattr(ranks, "evaluation_groups", lambda *_: (ParallelContext(tp_size=2), Ranks(size=2)))
    with pytest.raises(LostRank) as raised:
        run_on_rank(fail, "cpu", Layout(tp_size=2))
    assert raised.value.code == 1
    assert "error: rank 0: rank 1 of its tensor group is gone; it was in the start" in capsys.readouterr().err


def test_a_start_without_shared_memory_ends_in_one_line(monkeypatch, capsys) -> None:
    def start(*_: object) -> None:
        raise SharedMemoryError("shared memory is full")

    monkeypatch.setattr(ranks, "evaluation_groups", start)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    assert run_on_rank(lambda place: 0, "cpu", Layout(tp_size=2)) == 2
    assert capsys.readouterr().err == "error: shared memory is full\n"


@pytest.mark.parametrize("error", [ValueError("damaged"), OSError(errno.EIO, "Input/output error")])
def test_an_error_of_one_rank_is_raised_in_place_of_a_wait_for_it(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(AgreedError, match=re.escape(str(error))) as raised:
        Ranks().agree(fail)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_see_only_their_own_gpu_are_all_refused(monkeypatch, rank: int) -> None:
    monkeypatch.setattr(os, "environ", torchrun_rank(rank, 2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="must see the GPUs of all 2 ranks of its node, but sees 1 "):
        evaluation_groups(Layout(tp_size=2), "cuda")
