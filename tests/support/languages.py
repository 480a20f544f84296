"""Language models of a moment's training, and their tokenizers. At the top of a module, so that ranks can import it."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = "the cat sat on the mat and the dog sat on the cat while the bird sang to the moon above the old mat "


class Letters:
    """The plainest tokenizer: a letter is a token."""

    alphabet = "abcdefghijklmnopqrstuvwxyz ."

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.alphabet[number] for number in ids)


class Speller(nn.Module):
    """A causal model that is none of transformers': it sums up what came before. Returns logits, and the loss."""

    def __init__(self, vocabulary: int = len(Letters.alphabet), width: int = 16, places: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(places, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.letters(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = x + torch.tanh(self.dropout(block(x.cumsum(1) / 4)))
        logits = self.head(x)
        if labels is None:
            return logits
        return {
            "logits": logits,
            "loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        }


def llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        **settings,
    )
    return LlamaForCausalLM(config)


def byte_pairs() -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's, trained on a sentence; no token to pad with."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.train_from_iterator(
        [WORDS],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")


def pages(tokenizer: Any, count: int = 24, length: int = 12) -> list[dict[str, Tensor]]:
    """Samples cut out of the same sentence, one place further each."""
    ids = torch.tensor(tokenizer.encode(WORDS * 4))
    cuts = [ids[start : start + length] for start in range(count)]
    return [{"input_ids": cut, "labels": cut} for cut in cuts]
