"""Encoding in windows gives what encoding in one go gives, for the kinds of tokenizers there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ithaca.data.encode import Encoder
from ithaca.data.tokenizer import TokenizerParts, fingerprint, load_tokenizer, tokenizer_parts

from .make import SPECIAL, byte_level, save_tokenizer, words

CORPUS = [words(300, seed, odd=True) for seed in range(15)]


def trimming() -> Tokenizer:
    """Byte level, with offsets that leave out spaces, as Llama 3 and Qwen have them."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # as from a file: JSON moves some scores of a fresh one by their last bit, once, and equal ways to split a word change places
    return Tokenizer.from_str(tokenizer.to_str())


def llama2() -> Tokenizer:
    """No words: merges may run over the whole text, and a space is put before it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, max_token_length=12, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def parts_of(tokenizer: Tokenizer) -> TokenizerParts:
    return tokenizer_parts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


@pytest.mark.parametrize("make", [byte_level, trimming, unigram, llama2])
def test_windows_change_nothing(make):
    tokenizer = make()
    encoder = Encoder(parts_of(tokenizer), window=6000)
    windows = 0
    for text in (words(8000, 1, odd=True), words(1500, 2), "a" * 30_000, " " * 30_000, "日本語" * 8000, "", "x"):
        whole = tokenizer.encode(text, add_special_tokens=False)
        found = list(encoder.stream(encoder.pieces(text)))
        assert np.concatenate([ids for ids, _ in found]).tolist() == whole.ids
        assert np.concatenate([places for _, places in found]).tolist() == [list(place) for place in whole.offsets]
        windows += len(found)
    assert windows > 15  # it was cut


def test_it_is_what_transformers_gives(tokenizer: Path):
    loaded = load_tokenizer(tokenizer)
    text = words(200, 5, odd=True) + " <|end|> and </s>"
    for parse in (False, True):
        (ids,) = Encoder(tokenizer_parts(loaded), parse=parse).batch([text])
        assert ids == loaded(text, add_special_tokens=False, split_special_tokens=not parse)["input_ids"]
        assert (2 in ids) == parse  # </s>


def test_truncation_that_somebody_left_in_the_file_is_not_applied():
    tokenizer, clean = byte_level(), byte_level()
    tokenizer.enable_truncation(5)
    assert fingerprint(parts_of(tokenizer)) == fingerprint(parts_of(clean))
    tokenizer.enable_padding(length=7)  # transformers makes a pad token of it, so this one is another tokenizer
    (ids,) = Encoder(parts_of(tokenizer)).batch([words(50)])
    assert ids == clean.encode(words(50), add_special_tokens=False).ids and len(ids) > 7


def test_parts(tmp_path: Path):
    plain, with_bos = byte_level(), byte_level(bos=True)
    assert parts_of(plain).prefix == () and parts_of(with_bos).prefix == (1,) and parts_of(with_bos).suffix == ()
    assert parts_of(plain).eos == 2 and parts_of(plain).vocabulary == 400
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    fast.add_tokens(["<new>"])
    assert tokenizer_parts(fast).vocabulary == 401


def test_fingerprints(tmp_path: Path):
    def of(folder: Path) -> dict[str, str]:
        return fingerprint(tokenizer_parts(load_tokenizer(folder)))

    first = of(save_tokenizer(tmp_path / "a"))
    load_tokenizer(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert of(tmp_path / "b") == first  # a copy is the same
    other = {
        "vocabulary": of(save_tokenizer(tmp_path / "c", byte_level(size=380))),
        "special_tokens": of(save_tokenizer(tmp_path / "d", eos_token="<|end|>")),
        "chat_template": of(save_tokenizer(tmp_path / "e", template="{{ messages[0].content }}")),
    }
    for name, found in other.items():
        assert {part for part in found if found[part] != first[part]} == {name, "all"}


def test_folders_without_a_tokenizer(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"the tokenizer folder .*nowhere is not there; give the folder of a local checkpoint"
    ):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
