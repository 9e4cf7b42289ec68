"""Small tokenizers built in code."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def word_tokenizer(
    vocab: dict[str, int], *, template: str | None, bos: bool, eos: str = "<eos>"
) -> PreTrainedTokenizerFast:
    """Splits at white space and around special tokens; puts `<bos>` in front by default where `bos`."""
    vocab = {"<unk>": 0, "<bos>": 1, eos: 2, **vocab}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    specials = [word for word in vocab if word[0] in "<[" and word[-1] in ">]" and word not in ("<unk>", "<bos>", eos)]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token=eos,
        additional_special_tokens=specials,
        chat_template=template,
    )
