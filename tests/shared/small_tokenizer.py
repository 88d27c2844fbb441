"""A real byte-level BPE tokenizer of a few hundred tokens, and its folder as Hugging Face's."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<|begin|>", "<|end|>"
CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = [
    "The river runs past the old mill and under the stone bridge.",
    "A small boat carries apples, pears and plums to the market each morning.",
    "def area(width, height):\n    return width * height\n",
    "In 1984 there were 3,141 houses here; in 2024 there are 5,926.",
    "Où est la gare? Die Straße ist naß. Он живёт у реки.",
    "Which of these is a fruit? The apple is a fruit. The bridge is of stone.",
]


def write_tokenizer_folder(folder: Path, begins: bool) -> int:
    """Writes the files of a tokenizer that may put a token before each text; returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, BEGIN] if begins else [END]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    names = {"eos_token": END}
    if begins:
        names["bos_token"] = BEGIN
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()
