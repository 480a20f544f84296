"""Text from models in training: what is written is what they say, on every layout, and nothing else changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import GenerationConfig
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import dalsegno as ds
from dalsegno.callbacks import ResumableSummaryWriter, TextgenCallback
from dalsegno.callbacks.loggers.textgen_callback import Sampler, Sampling, choose
from dalsegno.distributed import collectives
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks
from support.languages import Letters, Speller, byte_pairs, llama, pages
from support.resumed import assert_resumes
from support.small import small_trainer

KINDS = ("plain", "llama", "lora")
PROMPTS = ["the cat", "the bird sang to", "a"]


def trainer(output_dir: Path, kind: str, *own: ds.Callback, **settings: Any) -> ds.Trainer:
    """Four steps, evaluated after the second and the fourth."""
    torch.manual_seed(0)
    tokenizer: Any = Letters() if kind == "plain" else byte_pairs()
    model: nn.Module = Speller() if kind == "plain" else llama()
    if kind == "lora":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False))
    parts = {
        "train_dataset": pages(tokenizer),
        "eval_dataset": pages(tokenizer, 4),
        "processing_class": tokenizer,
    }
    given = {"max_steps": 4, "eval_steps": 2, "per_device_train_batch_size": 4 // collectives.world_size(), **settings}
    return small_trainer(output_dir, *own, model=model, parts=parts, **given)


def texts(output_dir: Path) -> dict[int, list[str]]:
    """Step to continuations."""
    records = list(read_records(output_dir / "logs/texts.jsonl"))
    assert all([text["prompt"] for text in record["texts"]] == PROMPTS for record in records)
    return {record["global_step"]: [text["text"] for text in record["texts"]] for record in records}


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_llama_writes_what_it_generates(tmp_path: Path) -> None:
    """Three prompts of different lengths at once, and each alone by hand: the same."""
    run = trainer(tmp_path, "llama", TextgenCallback(prompts=PROMPTS, max_new_tokens=12))
    run.train()
    assert run.model.training
    written = texts(tmp_path)
    assert list(written) == [2, 4]
    tokenizer, model = byte_pairs(), run.model.eval()
    for prompt, text in zip(PROMPTS, written[4], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        (whole,) = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=1)
        assert tokenizer.decode(whole, skip_special_tokens=True) == prompt + text


def test_a_model_of_ones_own_is_sampled(tmp_path: Path) -> None:
    run = trainer(tmp_path, "plain", TextgenCallback(prompts=PROMPTS, max_new_tokens=20))
    run.train()
    assert run.model.training
    model, letters = run.model.eval(), Letters()
    for prompt, text in zip(PROMPTS, texts(tmp_path)[4], strict=True):
        ids = letters.encode(prompt)
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert letters.decode(ids) == prompt + text


def test_text_is_drawn_by_chance_but_not_by_the_trainings(tmp_path: Path) -> None:
    drawing = {"do_sample": True, "temperature": 2.0}
    for kind in ("plain", "llama"):
        outcomes = {}
        for way, own in {
            "greedy": [TextgenCallback(prompts=PROMPTS, max_new_tokens=8)],
            "drawn": [TextgenCallback(prompts=PROMPTS, generation_config=drawing, max_new_tokens=8)],
            "again": [TextgenCallback(prompts=PROMPTS, generation_config=drawing, max_new_tokens=8)],
            "without": [],
        }.items():
            run = trainer(tmp_path / kind / way, kind, *own)
            run.train()
            outcomes[way] = [*run.model.state_dict().values(), torch.rand(4)]
        generated = {way: texts(tmp_path / kind / way) for way in ("greedy", "drawn", "again")}
        assert generated["drawn"] == generated["again"] != generated["greedy"]
        assert generated["drawn"][2] != generated["drawn"][4]
        for way in ("greedy", "drawn"):
            assert all(map(torch.equal, outcomes[way], outcomes["without"]))


def test_a_config_of_transformers_will_do(tmp_path: Path) -> None:
    config = GenerationConfig(do_sample=False, bad_words_ids=[[3]], max_new_tokens=99)
    trainer(tmp_path, "llama", TextgenCallback(None, PROMPTS, config, max_new_tokens=3)).train()
    tokens = [len(byte_pairs().encode(text)) for text in texts(tmp_path)[4]]
    assert max(tokens) <= 3 + 1  # a character of several bytes may be cut


def test_where_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = ResumableSummaryWriter()
    trainer(tmp_path, "plain", writer, TextgenCallback(writer, PROMPTS, max_new_tokens=5)).train()
    printed = capsys.readouterr().out.splitlines()
    written = texts(tmp_path)
    assert printed == [
        f"{step:>9}  text: {prompt}|{text}"
        for step, generated in written.items()
        for prompt, text in zip(PROMPTS, generated, strict=True)
    ]
    reader = EventAccumulator(str(tmp_path / "logs/tensorboard"))
    reader.Reload()
    drawn = reader.Tensors("text/1/text_summary")
    assert [event.step for event in drawn] == [2, 4]
    assert drawn[1].tensor_proto.string_val[0].decode() == f"    {PROMPTS[1]}|{written[4][1]}"


def test_what_a_model_writes_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Escaping(Letters):
        def decode(self, ids: list[int]) -> str:
            return "\x1b[2J\n" * len(ids)

    parts = {"train_dataset": pages(Letters()), "eval_dataset": pages(Letters(), 4), "processing_class": Escaping()}
    generating = TextgenCallback(prompts=["a"], max_new_tokens=1)
    small_trainer(tmp_path, generating, model=Speller(), parts=parts, max_steps=2, eval_steps=2).train()
    assert capsys.readouterr().out == f"        2  text: a|\\x1b[2J\n{' ' * 17}\n"


# --- on several ranks -------------------------------------------------------------------------------------------------


def write_unmoved(output_dir: Path, kind: str, layout: Any) -> None:
    """With weights that do not change, every layout has the same; drawn, so that the ranks must draw alike."""
    drawing = {"do_sample": True, "temperature": 1.5, "top_k": 30}
    generating = TextgenCallback(prompts=PROMPTS, generation_config=drawing, max_new_tokens=3)
    given = {"optim": "sgd", "learning_rate": 0.0, "weight_decay": 0.0, "max_steps": 2, "eval_steps": 1}
    trainer(output_dir, kind, generating, parallel=layout, **given).train()


def layouts_of(kind: str, ranks: int) -> dict[str, Any]:
    """The Llama has all. The plain model's plan and stages are its own; PEFT's adapters have no plan for a split."""
    stages = ds.Pipeline(["head"] if kind == "plain" else 2, "gpipe")
    whole = ColwiseParallel(output_layouts=Replicate())
    split = ds.TensorParallel({"blocks.*": whole} if kind == "plain" else "auto", size=2)
    found: dict[str, Any]
    if ranks == 2:
        found = {"fsdp": "fsdp", "ddp": "ddp", "pp": stages, "tp": split}
    else:
        found = {"pp x fsdp": [stages, ds.FSDP()], "hsdp": ds.HSDP(replicate=2), "tp x fsdp": [split, ds.FSDP()]}
    chosen = {"plain": ("pp", "tp"), "lora": ("fsdp", "pp"), "llama": found}[kind]
    return {name: layout for name, layout in found.items() if name in chosen}


def write_under_each(output_dir: Path, ranks: int) -> None:
    for kind in KINDS:
        for name, layout in layouts_of(kind, ranks).items():
            write_unmoved(output_dir / kind / name, kind, layout)


def test_all_ranks_take_part(tmp_path: Path) -> None:
    for ranks in (2, 4):
        run_ranks(write_under_each, ranks, tmp_path, ranks)
    for kind in KINDS:
        write_unmoved(tmp_path / kind / "alone", kind, "none")
        expected = texts(tmp_path / kind / "alone")
        assert list(expected) == [1, 2] and expected[1] != expected[2]
        for name in {**layouts_of(kind, 2), **layouts_of(kind, 4)}:
            assert texts(tmp_path / kind / name) == expected, (kind, name)


# --- which evaluations, and after a resume ----------------------------------------------------------------------------


def test_so_many_steps_lie_between(tmp_path: Path) -> None:
    generating = TextgenCallback(prompts=PROMPTS, generation_steps=5, max_new_tokens=2)
    trainer(tmp_path, "plain", generating, max_steps=16).train()
    assert list(texts(tmp_path)) == [2, 8, 14]


def test_two_sets_are_one_evaluation(tmp_path: Path) -> None:
    run = small_trainer(
        tmp_path,
        TextgenCallback(prompts=PROMPTS, max_new_tokens=2),
        model=Speller(),
        parts={
            "train_dataset": pages(Letters()),
            "eval_dataset": {"a": pages(Letters(), 4), "b": pages(Letters(), 4)},
            "processing_class": Letters(),
        },
        max_steps=4,
        eval_steps=2,
    )
    run.train()
    assert list(texts(tmp_path)) == [2, 4]
    run.evaluate()  # outside of training nothing is written
    assert list(texts(tmp_path)) == [2, 4]


def build(output_dir: Path, *own: ds.Callback) -> ds.Trainer:
    drawing = {"do_sample": True, "top_p": 0.9}
    generating = TextgenCallback(prompts=PROMPTS, generation_config=drawing, generation_steps=3, max_new_tokens=4)
    return trainer(output_dir, "plain", generating, *own, max_steps=12, save_steps=100)


def test_resumed_anywhere_it_writes_the_same(tmp_path: Path) -> None:
    assert_resumes(build, tmp_path, 3, 7)
    assert texts(tmp_path / "parts") == texts(tmp_path / "whole") and list(texts(tmp_path / "whole")) == [2, 6, 10]


# --- the sampler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.5), (0, 1e-9), (1, 1.0)])
def test_it_draws_from_the_tokens_that_transformers_would(top_k: int, top_p: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 12)
    allowed = logits / 0.7
    if top_k:
        allowed = TopKLogitsWarper(top_k)(torch.zeros(4, 1), allowed)
    allowed = TopPLogitsWarper(top_p)(torch.zeros(4, 1), allowed)
    sampling = Sampling(do_sample=True, temperature=0.7, top_k=top_k, top_p=top_p)
    drawn = torch.stack([choose(logits, sampling) for _ in range(4000)], 1)
    counts = torch.stack([row.bincount(minlength=12) for row in drawn])
    assert not counts[allowed.isinf()].any()
    assert torch.allclose(counts / 4000, allowed.softmax(-1), atol=0.04)


class Counting(nn.Module):
    """Says of every token that the next number follows."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": nn.functional.one_hot((ids + 1) % 10, 10).float()}


@pytest.mark.parametrize(
    ("sampling", "most", "expected"),
    [
        (Sampling(), 3, [[3, 4, 5], [1, 2, 3]]),
        (Sampling(eos_token_id=4), 9, [[3], [1, 2, 3]]),
        (Sampling(eos_token_id=[3, 2]), 9, [[], [1]]),
        (Sampling(max_length=4), 9, [[3, 4], [1, 2]]),
        (Sampling(max_length=2), 9, [[], []]),
    ],
)
def test_where_a_text_ends(sampling: Sampling, most: int, expected: list[list[int]]) -> None:
    sampler = Sampler(Counting(), sampling, torch.device("cpu"), None)
    assert sampler([[1, 2], [0]], most) == expected


# --- what cannot work fails before the training -----------------------------------------------------------------------


def test_what_cannot_generate_fails_before_the_first_step(tmp_path: Path) -> None:
    parts = {"processing_class": Letters()}
    regression = small_trainer(tmp_path, TextgenCallback(prompts=["a"]), parts=parts, max_steps=2)
    with pytest.raises((ds.ConfigurationError, TypeError)) as failed:
        regression.train()
    assert "tried once" in failed.value.__notes__[0]
    assert regression.state.global_step == 0
    with pytest.raises(IndexError) as too_long:
        trainer(tmp_path / "long", "plain", TextgenCallback(prompts=PROMPTS, max_new_tokens=60)).train()
    assert "with the longest text: 75 tokens" in too_long.value.__notes__[0]
    fits = TextgenCallback(prompts=PROMPTS, generation_config={"max_length": 64}, max_new_tokens=60)
    assert trainer(tmp_path / "fits", "plain", fits).train().reason == "finished"


def test_a_model_that_returns_something_else(tmp_path: Path) -> None:
    class Silent(Speller):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(input_ids, input_ids if labels is None else labels)["loss"]

    data = {"train_dataset": pages(Letters()), "processing_class": Letters()}
    with pytest.raises(ds.ConfigurationError, match=r"Silent must have .* return logits .* a tensor of shape \(\)"):
        small_trainer(
            tmp_path, TextgenCallback(prompts=["a"], max_new_tokens=3), model=Silent(), parts=data, max_steps=2
        ).train()


def test_a_trainer_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"processing_class=None: .*dalsegno\[text\]"):
        small_trainer(tmp_path, TextgenCallback(prompts=["a"]), max_steps=2).train()


def test_settings_that_the_model_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ds.UnknownName, match="'temprature'; did you mean 'temperature'"):
        trainer(tmp_path, "plain", TextgenCallback(prompts=PROMPTS, generation_config={"temprature": 2.0})).train()
    with pytest.raises(ValueError, match="temprature"):
        trainer(tmp_path, "llama", TextgenCallback(prompts=PROMPTS, generation_config={"temprature": 2.0})).train()
    with pytest.raises(ds.ConfigurationError, match="no generate of transformers"):
        trainer(tmp_path, "plain", TextgenCallback(prompts=PROMPTS, generation_config=GenerationConfig())).train()


def test_prompts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text("- the cat\n- the bird sang to\n- |-\n  a\n")
    run = trainer(tmp_path, "plain", TextgenCallback(prompts=str(path), max_new_tokens=2))
    run.train()
    assert list(texts(tmp_path)) == [2, 4]
    for content, message in [
        ("the cat", "'the cat'; needs a list of strings"),
        ("- 1\n- a", r"\[0\]: 1; needs a string, in quotes"),
        ("- [", "while parsing"),
        ("", "None; needs a list of strings"),
    ]:
        path.write_text(content)
        with pytest.raises(ds.ConfigurationError, match=message):
            TextgenCallback(prompts=path)
    with pytest.raises(ds.NotFound, match="no such file; pass a prompt itself in a list"):
        TextgenCallback(prompts="the cat")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ds.ConfigurationError, match=r"in a clone of dalsegno, pip install -e '\.\[yaml\]'"):
        TextgenCallback(prompts=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, r"prompts: \[\]; needs a list of strings"),
        ({"prompts": ["a", 3]}, r"prompts\[1\]: 3; needs a string"),
        ({"summary_writer": 1}, "summary_writer=1; it has no add_text"),
        ({"generation_steps": 0}, "generation_steps=0; needs an integer of at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0; needs an integer of at least 1"),
        ({"generation_config": 3}, "generation_config=3; needs a mapping"),
        ({"generation_config": {"temperature": 0}}, "temperature=0; needs a finite number over 0"),
        ({"generation_config": {"top_p": 1.5}}, "top_p=1.5; needs a number over 0 and up to 1"),
        ({"generation_config": {"do_sample": 1}}, "do_sample=1; allowed are True and False"),
        ({"generation_config": {"max_new_tokens": 3}}, r"give it as TextgenCallback\(max_new_tokens=…\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        TextgenCallback(**{"prompts": ["a"], **arguments})
