"""What transformers itself says about a checkpoint, to compare engines with."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class ReferenceModel:
    """Plain forward passes in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.vocab_size: int = self.model.config.vocab_size

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[T, V]"""
        return self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Of each output token at its place."""
        ids = [*prompt, *output]
        table = (self.logits(ids) / temperature).log_softmax(-1)
        return [float(table[position - 1, ids[position]]) for position in range(len(prompt), len(ids))]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        output: list[int] = []
        for _ in range(num_tokens):
            output.append(int(self.logits([*prompt, *output])[-1].argmax()))
        return output

    @cached_property
    def prompt_that_ends(self) -> list[int]:
        """A prompt after which the most likely token is the end of sequence."""
        generator = torch.Generator().manual_seed(0)
        end = self.tokenizer.eos_token_id
        with torch.no_grad():
            while True:
                prompts = torch.randint(0, 256, (256, 5), generator=generator)
                best = self.model(input_ids=prompts, use_cache=False).logits[:, -1].argmax(-1)
                if (best == end).any():
                    return prompts[int((best == end).nonzero()[0])].tolist()

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every weight once, as a trainer would send them."""
        return [(name, tensor.detach()) for name, tensor in self.model.named_parameters()]
