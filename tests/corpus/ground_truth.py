"""Reference for the near-duplicate search: Python's `re`, sets and `hash`, and a count over all pairs."""

import gzip
import json
import re
import tarfile
from pathlib import Path

import numpy as np

from lmscale.corpus.duplicates import candidate_pairs, causes, choose_survivors, clusters, exact_jaccard
from lmscale.corpus.minhash import band_hashes
from lmscale.corpus.shingles import UNSPACED, shingle_sets

_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED)
_WORDS = re.compile(rf"(?![{_ALONE}])\w(?:(?![{_ALONE}])\w)*|(?=[{_ALONE}])\w")


def plain_shingles(text: str, n: int) -> set:
    """`shingle_sets` in plain Python."""
    words = _WORDS.findall(text.lower())
    if not words:
        return {text.lower().strip()}
    if len(words) < n:
        return {tuple(words)}
    return set(zip(*(words[k:] for k in range(n)), strict=False))


def similar_pairs(texts: list[str], n: int, threshold: float) -> dict[tuple[int, int], float]:
    """All pairs (i, j), i < j, with a Jaccard similarity of at least `threshold`: brute force, exact.

    For each document the documents of every one of its shingles are counted. Python's own 64-bit hash stands for a
    shingle.
    """
    sets = [np.fromiter(map(hash, plain_shingles(text, n)), dtype=np.int64) for text in texts]
    sizes = np.array([len(held) for held in sets])
    values, documents = np.concatenate(sets), np.repeat(np.arange(len(texts)), sizes)
    distinct, numbers = np.unique(values, return_inverse=True)
    by_shingle = documents[np.argsort(numbers, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=len(distinct)))])
    borders = np.concatenate([[0], np.cumsum(sizes)])
    found = {}
    for i in range(len(texts)):
        mine = numbers[borders[i] : borders[i + 1]]
        mine = mine[first[mine + 1] - first[mine] > 1]
        others = [by_shingle[a:b] for a, b in zip(first[mine].tolist(), first[mine + 1].tolist(), strict=True)]
        if not others:
            continue
        common = np.bincount(np.concatenate(others), minlength=len(texts))
        partners = i + 1 + np.flatnonzero(common[i + 1 :])
        jaccard = common[partners] / (sizes[i] + sizes[partners] - common[partners])
        enough = jaccard >= threshold
        found |= {(i, j): s for j, s in zip(partners[enough].tolist(), jaccard[enough].tolist(), strict=True)}
    return found


def searched_pairs(texts: list[str], n: int = 5, threshold: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Pairs found by the pipeline: int64 [pairs, 2] of at least `threshold`, and their similarities."""
    values, offsets = shingle_sets(texts, n)
    hashes = band_hashes(values, offsets)
    candidates = [candidate_pairs(hashes[:, band])[0] for band in range(hashes.shape[1])]
    pairs = np.unique(np.concatenate(candidates), axis=0)
    jaccard = exact_jaccard(values, offsets, pairs)
    return pairs[jaccard >= threshold], jaccard[jaccard >= threshold]


def removals(texts: list[str]) -> dict[str, tuple[str, float]]:
    """For each removed text the one it was removed for, and their similarity. No text may be in `texts` twice.

    The search numbers the texts as they come; for the rest their number is their place in sorted order, which is what
    a key made of the text is for.
    """
    pairs, jaccard = searched_pairs(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    place = np.empty(len(texts), dtype=np.int64)
    place[order] = np.arange(len(texts))
    pairs = place[pairs]
    labels = clusters(len(texts), pairs)
    keep = choose_survivors(labels, np.array([len(texts[i]) for i in order]))
    removed, because_of, similarity = causes(labels, keep, pairs, jaccard)
    return {
        texts[order[i]]: (texts[order[j]], s)
        for i, j, s in zip(removed.tolist(), because_of.tolist(), similarity.tolist(), strict=True)
    }


def race_articles(data: Path, split: str) -> list[str]:
    """The passages of RACE's `train` or `dev`."""
    with gzip.open(data / "race" / f"race_{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["article"] for line in file]


def newsgroup_bodies(data: Path) -> dict[str, str]:
    """What follows the first blank line of each post, by `GROUP/NUMBER`."""
    bodies = {}
    with tarfile.open(data / "newsgroups" / "20_newsgroups.shared.tar.gz") as archive:
        for member in archive:
            if member.isfile():
                body = re.split(rb"\r?\n\r?\n", archive.extractfile(member).read(), maxsplit=1)[-1]
                bodies["/".join(member.name.split("/")[-2:])] = _decode(body)
    return bodies


def _decode(raw: bytes) -> str:
    for encoding in ("utf-8", "cp1252"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            pass
    return raw.decode("latin-1")
