"""The tokenizer and chat template of the checkpoints of `disagg.testing.checkpoint`.

A byte-level BPE, trained on text that is generated here, so that it is the same everywhere. Every
id of the model's vocabulary must decode to text, because a random model chooses any of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (END_OF_TEXT, IM_START, IM_END)
MIN_VOCABULARY = 256 + len(_SPECIAL)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had
an they which one you were all her she there would their we him been has when who will no more if
out so up said what its about than into them can only other time new some could these two may
first then do any like my now over such our man me even most made after also did many before must
through back years where much your way well down should because each just those people how too
little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go
came right used take three answer question model prompt token cache server memory machine block
"""
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl st t th tr v w"
_VOWELS = "a e i o u ai ea ee io oa ou"
_CODAS = "b ck d ft g l lt m n nd ng nt p r rd rk rn s ss st t th x"


def write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> int:
    """Write the tokenizer's files; returns the id of the token that ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(max(2000, vocab_size)), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|unused_{index}|>" for index in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    end_of_turn = tokenizer.token_to_id(IM_END)
    assert isinstance(end_of_turn, int)
    return end_of_turn


def _sentences(count: int) -> Iterator[str]:
    """Training text: common English words, and enough made-up words for any vocabulary."""
    choose = random.Random(0)
    common, onsets = _WORDS.split(), _ONSETS.split()
    vowels, codas = _VOWELS.split(), _CODAS.split()
    for number in range(count):
        words = [
            choose.choice(common)
            if choose.random() < 0.6
            else "".join(
                choose.choice(onsets) + choose.choice(vowels) + choose.choice(codas)
                for _ in range(choose.randint(1, 3))
            )
            for _ in range(choose.randint(5, 14))
        ]
        sentence = " ".join(words).capitalize()
        yield f"{sentence}{choose.choice('.,;:?!')} {number % 97}\n"
