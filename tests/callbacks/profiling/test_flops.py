"""FLOPs of a step: against what each family of models takes by hand; and counting them changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import dalsegno as ds
from dalsegno.callbacks import DefaultMetrics, FlopUtilization, JsonLogger
from dalsegno.callbacks.profiling.flops import Uncountable, count_flops
from dalsegno.callbacks.profiling.speed import known_peak
from dalsegno.logs import read_records
from dalsegno.testing import TinyLanguageModel, run_ranks
from support.listeners import Listener
from support.models import Line
from support.small import small_trainer

SAMPLES, LENGTH = 2, 16
TOKENS = SAMPLES * LENGTH
WIDTH, WIDE, LAYERS, HEADS, VOCABULARY = 32, 64, 2, 4, 64
ATTENTION = 2 * 2 * TOKENS * LENGTH * WIDTH  # the scores, and what they weigh
PROJECTED = 2 * TOKENS * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2)  # keys and values of half as many heads
HEAD = 2 * TOKENS * WIDTH * VOCABULARY
GATED = 2 * TOKENS * 3 * WIDTH * WIDE

Family = tuple[nn.Module, dict[str, Tensor], float]


def texts() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def gpt2() -> Family:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS))
    return model, texts(), 3 * (LAYERS * (2 * TOKENS * 12 * WIDTH**2 + ATTENTION) + HEAD)


def sizes() -> dict[str, int]:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    return {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDE, **heads}


def llama_model() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes()))


def llama() -> Family:
    return llama_model(), texts(), 3 * (LAYERS * (PROJECTED + ATTENTION + GATED) + HEAD)


def checkpointed() -> Family:
    """What is done again in the backward pass does not count."""
    model, batch, flops = llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train(), batch, flops


def checkpointed_in_the_old_way() -> Family:
    model, batch, flops = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    model.model.embed_tokens.register_forward_hook(lambda *_: pytest.fail("a hook of the model's"))  # type: ignore
    return model.train(), batch, flops


def mixtral() -> Family:
    """Each token goes to two of four experts."""
    config = MixtralConfig(num_hidden_layers=LAYERS, num_local_experts=4, num_experts_per_tok=2, **sizes())
    router = 2 * TOKENS * WIDTH * 4
    return MixtralForCausalLM(config), texts(), 3 * (LAYERS * (PROJECTED + ATTENTION + router + 2 * GATED) + HEAD)


def vit() -> Family:
    """No gradient is needed of the pictures; 16 patches of 8 by 8 and the class."""
    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=32,
        patch_size=8,
    )
    length = 17
    batch = {"pixel_values": torch.randn(SAMPLES, 3, 32, 32), "labels": torch.zeros(SAMPLES, dtype=torch.int64)}
    block = 2 * SAMPLES * length * (4 * WIDTH**2 + 2 * WIDTH * WIDE) + 4 * SAMPLES * length**2 * WIDTH
    patches = 2 * SAMPLES * 16 * 3 * 64 * WIDTH
    return ViTForImageClassification(config), batch, 3 * (LAYERS * block + 2 * SAMPLES * WIDTH * 2) + 2 * patches


def lora() -> Family:
    """Frozen weights have no gradients: what they multiply has, from the first adapter on."""
    rank, narrow = 4, WIDTH // 2
    model = get_peft_model(llama_model(), LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))  # type: ignore
    into, out = 2 * TOKENS * 2 * WIDTH * rank, 2 * TOKENS * (WIDTH + narrow) * rank
    frozen = LAYERS * (PROJECTED + ATTENTION + GATED) + HEAD
    of_frozen_inputs = frozen + LAYERS * ATTENTION - 2 * TOKENS * WIDTH * (WIDTH + 2 * narrow)  # not the first ones'
    adapters = LAYERS * 3 * (into + out) - into  # nor of what goes into the first
    return model, texts(), frozen + of_frozen_inputs + adapters


def lstm() -> Family:
    matrices = 4 * WIDTH * (2 * WIDTH + 2 * WIDTH)
    model = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
    return model, {"input": torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True)}, 3 * 2 * TOKENS * matrices


FAMILIES = [gpt2, llama, checkpointed, checkpointed_in_the_old_way, mixtral, vit, lora, lstm]


@pytest.mark.parametrize("build", FAMILIES, ids=lambda build: build.__name__)
def test_by_hand(build: Callable[[], Family]) -> None:
    model, batch, expected = build()
    numbers = torch.get_rng_state()
    assert count_flops(model, (), batch) == expected
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(each.grad is None for each in model.parameters())


class Quantized(nn.Linear):
    """As bitsandbytes keeps it: two weights of four bits in a byte, which a kernel of its own multiplies."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__(width, wide)
        packed = torch.zeros(width * wide // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a kernel")


def test_what_is_around_a_model_makes_no_difference() -> None:
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 1))
    expected = 3 * 2 * 5 * (8 * 16 + 16 * 4 + 4) - 2 * 5 * 8 * 16
    x = torch.randn(5, 8)
    assert count_flops(plain, (x,), {}) == expected
    assert count_flops(torch.compile(plain, backend="inductor", fullgraph=True), (x,), {}) == expected  # type: ignore[arg-type]
    plain[1] = torch.compile(plain[1], backend="eager")  # type: ignore[assignment]
    assert count_flops(plain, (x,), {}) == expected
    plain[2] = Quantized(16, 4)
    assert count_flops(plain, (x,), {}) == expected - 2 * 5 * 16 * 4


@pytest.mark.parametrize(
    ("name", "shapes", "products"),
    [
        ("addmm", [(4, 5), (4, 3), (3, 5)], 4 * 3 * 5),
        ("baddbmm", [(2, 4, 5), (2, 4, 3), (2, 3, 5)], 2 * 4 * 3 * 5),
        ("addbmm", [(4, 5), (2, 4, 3), (2, 3, 5)], 2 * 4 * 3 * 5),
        ("addmv", [(4,), (4, 3), (3,)], 4 * 3),
    ],
)
def test_a_product_in_place_counts_as_the_one_beside_it(name: str, shapes: list[Any], products: int) -> None:
    class Adds(nn.Module):
        def __init__(self, method: str) -> None:
            super().__init__()
            self.method = method
            self.weight = nn.Parameter(torch.ones(shapes[2]), requires_grad=False)

        def forward(self, start: Tensor, a: Tensor) -> Tensor:
            return getattr(start.clone(), self.method)(a, self.weight).sum()

    given = (torch.zeros(shapes[0]), torch.ones(shapes[1], requires_grad=True))
    beside, in_place = (count_flops(Adds(method), given, {}) for method in (name, f"{name}_"))
    assert in_place == beside >= 2 * products


class Counting(nn.Module):
    """Changes itself in each forward, and goes by a count of its own; its weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.requires_grad_(False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.kept.append(checkpoint(self.layer, x, use_reentrant=False))
        return self.kept[-1].sum() * int(self.passes)


def test_the_model_stays_as_it_is() -> None:
    model = Counting()
    assert count_flops(model, (torch.randn(2, 8),), {}) == 2 * 2 * 8 * 8
    assert int(model.passes) == 0 and not model.kept


class Sorting(Line):
    """Goes by what its numbers are."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) if x.sum() > -1e9 else y.sum()


def records(output_dir: Path) -> list[dict[str, Any]]:
    return [each for each in read_records(output_dir / "logs/train.jsonl") if "kind" not in each]


def test_what_cannot_be_counted_is_said_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = [JsonLogger(), DefaultMetrics(1e12), FlopUtilization(1e12)]
    small_trainer(tmp_path, *own, model=Sorting(), max_steps=3, logging_steps=1).train()
    assert len(records(tmp_path)) == 3
    assert not any({"mfu", "flops_per_second"} & each.keys() for each in records(tmp_path))
    warned = [each for each in caplog.messages if "FLOPs cannot be counted" in each]
    assert len(warned) == 1 and "DataDependent" in warned[0]


def test_a_kernel_that_nobody_knows_is_not_taken_for_nothing() -> None:
    @torch.library.custom_op("testing_flops::product", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    product.register_autograd(lambda ctx, gradient: (None, None))

    class Own(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return product(a, a).sum()

    with pytest.raises(Uncountable, match=r"testing_flops::product has no formula .*register_flop_formula"):
        count_flops(Own(), (torch.randn(2, 2),), {})


@pytest.mark.parametrize("given", [True, False])
def test_a_compiled_model_stays_compiled(tmp_path: Path, given: bool) -> None:
    """By the user, or by the trainer: the graph runs in each step, and only once has it been made."""
    made, ran = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)

        def run(*args: Any) -> Any:
            ran.append(1)
            return graph(*args)

        return run

    torch.compiler.reset()
    register_backend(backend, name=f"counted_{given}")
    model: Any = torch.compile(Line(), backend=backend, fullgraph=True) if given else Line()
    settings = {} if given else {"torch_compile": True, "torch_compile_backend": "counted_False"}
    own = [JsonLogger(), DefaultMetrics(peak_hardware_flops=989e12), FlopUtilization(peak_hardware_flops=989e12)]
    small_trainer(tmp_path, *own, model=model, max_steps=5, logging_steps=1, **settings).train()
    assert (len(made), len(ran)) == (1, 5)
    assert all(each["mfu"] > 0 for each in records(tmp_path))


def language_run(
    output_dir: Path, parallel: str = "none", batch: int = 4, total: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    parts = {"train_dataset": [{"input_ids": row, "labels": row.roll(-1)} for row in rows]}
    seconds: list[int] = []  # one each step
    passing = Listener({"on_step_begin": lambda ctx: seconds.append(1)})
    own = [JsonLogger(), passing, DefaultMetrics(peak_flops_per_device=1e12), FlopUtilization(**(total or {}))]
    settings = {"max_steps": 2, "logging_steps": 1, "parallel": parallel, "per_device_train_batch_size": batch}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dalsegno.state.time", SimpleNamespace(perf_counter=lambda: len(seconds)))
        small_trainer(output_dir, *own, model=TinyLanguageModel(width=WIDTH), parts=parts, **settings).train()
    return records(output_dir)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_utilization_has_one_definition(tmp_path: Path, parallel: str) -> None:
    """FLOPs of a token, by hand, times tokens a second, over the peak of all devices; whoever says it."""
    block = 2 * WIDTH * (3 * WIDTH + WIDTH + 8 * WIDTH) + 2 * 2 * LENGTH * WIDTH
    of_a_token = 3 * (2 * block + 2 * WIDTH * 256)
    alone = language_run(tmp_path / "alone")
    run_ranks(language_run, 2, tmp_path / parallel, parallel, 2)
    for devices, logged in ((1, alone), (2, records(tmp_path / parallel))):
        for each in logged:
            assert each["mfu"] == pytest.approx(each["tok_per_sec"] * of_a_token / (devices * 1e12), rel=0.05)
            if devices == 1:
                assert each["mfu"] == pytest.approx(each["flops_per_second"] / 1e12, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "bf16", "fp16"),
    [
        ("NVIDIA B200", 2250e12, 2250e12),
        ("NVIDIA H200", 989e12, 989e12),
        ("NVIDIA H200 NVL", 835e12, 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 989e12),
        ("NVIDIA H800", 989e12, 989e12),
        ("NVIDIA H20", 148e12, 148e12),
        ("AMD Instinct MI300X", 1307.4e12, 1307.4e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12, 209.5e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA L40", 181e12, 181e12),
        ("NVIDIA L4", 121e12, 121e12),
        ("NVIDIA RTX A1000", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("Tesla V100-SXM2-32GB", None, 125e12),
    ],
)
def test_a_peak_is_known_by_the_whole_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, bf16: float | None, fp16: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda = torch.device("cuda")
    assert known_peak(cuda, ds.TrainingArguments(tmp_path, bf16=True)) == bf16
    assert known_peak(cuda, ds.TrainingArguments(tmp_path, fp16=True)) == fp16
    assert known_peak(cuda, ds.TrainingArguments(tmp_path)) is None
    assert known_peak(torch.device("cpu"), ds.TrainingArguments(tmp_path, bf16=True)) is None


def test_a_peak_is_of_one_device_or_of_all_and_never_guessed(tmp_path: Path) -> None:
    of_one = run_ranks(language_run, 2, tmp_path / "one", "ddp", 2, {"peak_flops_per_device": 1e12})[0]
    of_all = run_ranks(language_run, 2, tmp_path / "all", "ddp", 2, {"peak_flops_in_total": 2e12})[0]
    for one, all_ in zip(of_one, of_all, strict=True):
        assert one["mfu"] == all_["mfu"] == pytest.approx(one["flops_per_second"] / 2e12, rel=1e-9)
    with pytest.raises(
        ds.RankFailed, match=r"peak_hardware_flops=1e\+12 is ambiguous on 2 ranks; give peak_flops_per_de"
    ):
        run_ranks(language_run, 2, tmp_path / "either", "ddp", 2, {"peak_hardware_flops": 1e12})
    with pytest.raises(
        ds.ConfigurationError, match="peak_flops_per_device and peak_flops_in_total are given; give only"
    ):
        FlopUtilization(peak_flops_per_device=1e12, peak_flops_in_total=1e12)
