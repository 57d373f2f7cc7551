"""Language identification: correct on English and other languages, deterministic, without a network."""

import gzip
import json
import subprocess
import sys
import tarfile

import pytest

from lmscale.corpus.language import FIRST_CHARACTERS, SURE, identify_language, known_languages

SENTENCES = {
    "en": "The old baker opened his shop before sunrise, because the first customers came from the night train.",
    "de": "Der alte Bäcker öffnete seinen Laden vor Sonnenaufgang, weil die ersten Kunden aus dem Nachtzug kamen.",
    "fr": "Le vieux boulanger ouvrait sa boutique avant l'aube, car les premiers clients arrivaient du train de nuit.",
    "es": "El viejo panadero abría su tienda antes del amanecer, porque los primeros clientes venían en tren.",
    "it": "Il vecchio fornaio apriva il negozio prima dell'alba, perché i primi clienti venivano dal treno di notte.",
    "pt": "O velho padeiro abria a sua loja antes do amanhecer, porque os primeiros clientes vinham de comboio.",
    "nl": "De oude bakker opende zijn winkel voor zonsopgang, omdat de eerste klanten uit de nachttrein kwamen.",
    "pl": "Stary piekarz otwierał sklep przed świtem, ponieważ pierwsi klienci przyjeżdżali nocnym pociągiem.",
    "ru": "Старый пекарь открывал лавку до рассвета, потому что первые покупатели приезжали ночным поездом.",
    "zh": "老面包师在日出之前就开了店，因为第一批顾客是坐夜车来的。他们总是又冷又饿。",
    "ja": "年老いたパン屋は夜明け前に店を開けた。最初の客が夜行列車で着くからだった。",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_the_language_of_a_sentence_is_identified(language) -> None:
    found, score = identify_language(SENTENCES[language])
    assert found == language and 0.5 < score <= 1.0


def test_real_english_is_identified(shared_data) -> None:
    with gzip.open(shared_data / "race" / "race_dev.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["article"] for line in file]
    with tarfile.open(shared_data / "newsgroups" / "20_newsgroups.shared.tar.gz") as archive:
        texts += [archive.extractfile(m).read().decode("latin-1") for m in archive if m.isfile()][::10]
    found = [identify_language(text) for text in texts]
    lost = sum(language != "en" or score < 0.3 for language, score in found)
    assert lost <= 0.005 * len(texts) and len(texts) > 2000


def test_text_in_capitals_is_identified() -> None:
    assert identify_language(SENTENCES["en"].upper())[0] == "en"
    assert identify_language(SENTENCES["de"].upper())[0] == "de"


@pytest.mark.parametrize("text", ["", " \n", "12,345 + 7 = ?", "-----\n=====", "'''"])
def test_a_text_without_letters_has_no_language(text) -> None:
    assert identify_language(text) == ("und", 0.0)


def test_tables_and_punctuation_do_not_change_the_language() -> None:
    words = SENTENCES["en"].split()
    assert identify_language(" |12.50| >> ".join(words)) == identify_language(" ".join(words).replace(".", " "))


def test_further_characters_are_read_only_if_the_first_are_inconclusive() -> None:
    clear, doubtful = (SENTENCES["en"] + " ") * 8, "Madrid Berlin Paris Roma Wien Lima Oslo Bern " * 16
    assert len(clear) > FIRST_CHARACTERS and len(doubtful) > FIRST_CHARACTERS
    assert identify_language(clear + SENTENCES["ru"] * 100) == identify_language(clear)
    assert identify_language(doubtful)[1] < SURE
    assert identify_language(doubtful + SENTENCES["ru"] * 8)[0] == "ru"
    assert identify_language("0" * FIRST_CHARACTERS + SENTENCES["ru"] * 8)[0] == "ru"


def test_the_codes_are_those_of_lid176() -> None:
    assert len(known_languages()) == 176 and {*SENTENCES} < known_languages()


def test_another_process_gives_the_same_scores_without_network_or_the_download_code() -> None:
    code = (
        "import json, socket, sys\n"
        "def refuse(*args): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from lmscale.corpus.language import identify_language\n"
        "texts = json.loads(sys.stdin.read())\n"
        "print(json.dumps([identify_language(t) for t in texts]))\n"
        "assert not {'requests', 'robust_downloader', 'torch'} & set(sys.modules)\n"
    )
    texts = list(SENTENCES.values())
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(texts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [list(identify_language(text)) for text in reversed(texts)][::-1]
