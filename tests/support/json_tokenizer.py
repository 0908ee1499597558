"""A tokenizer of bytes and of what is frequent in JSON, over the borders of its parts: `": "`, `", "`, `},`."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.runtime.tokenizer import FileTokenizer

TEXT = '{"name": "Ann", "age": 31, "tags": ["a", "b"], "ok": true, "none": null, "size": -1.5e3} no yes 2026-11-30'


@cache
def tokenizer(num_merges: int = 150) -> FileTokenizer:
    """257 + num_merges tokens; the first ends a text."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + num_merges,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT[start:end] for start in range(40) for end in range(50, 80)], trainer)
    return FileTokenizer(library.to_str())
