"""ExpertLoadBalance on models of Hugging Face: against what reaches their experts, whoever sends it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import dalsegno as ds
from dalsegno.callbacks import ExpertLoadBalance, JsonLogger
from dalsegno.events.table import Event
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks
from support.resumed import assert_resumes
from support.small import small_trainer

EXPERTS, LENGTH, PADDED = 4, 12, 5


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
        )
    )


def deepseek() -> nn.Module:
    """Its bias sends most tokens to experts whose scores are not the highest; a token's two are of one group."""
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=8,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            first_k_dense_replace=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            q_lora_rank=4,
            kv_lora_rank=4,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
        )
    )
    model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias[:2] += 0.3
    return model


def switch() -> nn.Module:
    """Its routers put out masks, without the tokens that an expert has no room for."""
    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=32,
            d_model=16,
            d_kv=4,
            d_ff=8,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=2,
            num_experts=EXPERTS,
            expert_capacity=4,
            decoder_start_token_id=0,
        )
    )


def texts() -> list[dict[str, Tensor]]:
    """Of different lengths, padded on the right."""
    torch.manual_seed(1)
    samples = []
    for number in range(4):
        ids = torch.randint(1, 32, (LENGTH,))
        mask = torch.ones(LENGTH, dtype=torch.int64)
        mask[LENGTH - PADDED * (number % 2) :] = 0
        samples.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids})
    return samples


class Sent:
    """What reaches each block's experts, token by token; without padding, but for a decoder of labels."""

    def __init__(self, model: nn.Module) -> None:
        self.loads: dict[str, Tensor] = {}
        self._mask = torch.zeros(0)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._look(name.removesuffix(".experts")))

    def _begin(self, module: nn.Module, args: Any, named: dict[str, Tensor]) -> None:
        self._mask = named["attention_mask"].flatten().bool()

    def _look(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...]) -> None:
            decided = args[1].flatten(0, -2)
            decided = decided if name.startswith("decoder.") else decided[self._mask]
            is_mask = decided.shape[-1] == EXPERTS
            self.loads[name] = decided.sum(0) if is_mask else torch.bincount(decided.flatten(), minlength=EXPERTS)

        return look


@pytest.mark.parametrize("build", [mixtral, deepseek, switch])
def test_what_the_router_decides_is_counted_without_padding(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = build(), texts()
    sent = Sent(model)
    own = [ExpertLoadBalance(every=1), JsonLogger()]
    small_trainer(tmp_path, *own, model=model, parts={"train_dataset": data}, max_steps=1, logging_steps=1).train()
    (record,) = [each for each in read_records(tmp_path / "logs/train.jsonl") if "kind" not in each]
    assert sent.loads
    keys = {key for key in record if key.startswith("expert_load/")}
    assert len(keys) == 3 * len(sent.loads)
    for name, loads in sent.loads.items():
        (title,) = {key.rpartition("/")[0] for key in keys if key.startswith(f"expert_load/{name}.")}
        shares = loads / loads.sum()
        entropy = torch.special.entr(shares).sum() / torch.tensor(float(EXPERTS)).log()
        assert record[f"{title}/max"] == pytest.approx(float(shares.max() * EXPERTS))
        assert record[f"{title}/entropy"] == pytest.approx(float(entropy))
        assert record[f"{title}/idle"] == int((loads == 0).sum())


class Scored(nn.Module):
    """Its router is a layer that scores four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, EXPERTS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.router(x).square().mean()


def test_what_cannot_be_seen_is_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="only scores, to which e_score_correction_bias is added"):
        small_trainer(tmp_path, ExpertLoadBalance(every=1), model=Chosen(), max_steps=1).train()


class Chosen(Scored):
    """A router of nothing but scores, whose choice is made elsewhere, with a bias to them."""

    def __init__(self) -> None:
        super().__init__()
        self.router.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))


def looked_at_before_a_record(output_dir: Path, *own: ds.Callback) -> ds.Trainer:
    """Steps 2, 4, 6 and 8 are looked at, and 5 and 10 have records."""
    torch.manual_seed(0)
    settings = {"max_steps": 10, "logging_steps": 5, "parallel": "auto", "per_device_train_batch_size": 2}
    looks = ExpertLoadBalance(every=2)
    return small_trainer(output_dir, JsonLogger(), looks, *own, model=Scored(), save_steps=4, **settings)


def test_what_was_counted_is_in_the_record_after_a_resume(tmp_path: Path) -> None:
    """The checkpoint is between the step that was measured and its record."""
    assert_resumes(looked_at_before_a_record, tmp_path, 4, 9)
    records = [each for each in read_records(tmp_path / "parts/logs/train.jsonl") if "kind" not in each]
    assert [each["global_step"] for each in records if "expert_load/router/max" in each] == [5, 10]


def test_what_was_counted_on_all_ranks_is_too(tmp_path: Path) -> None:
    kill = FaultPlan(event=Event.STEP_BEGIN, count=5)
    assert_resume_equivalent(looked_at_before_a_record, [kill], world_size=2, folder=tmp_path)


def count(output_dir: Path, parallel: Any, lengths: list[int]) -> None:
    """One step of four micro-batches, of texts that are padded each by its own amount."""
    torch.manual_seed(0)
    data = []
    for number, length in enumerate(lengths):
        ids = torch.randint(1, 32, (length,), generator=torch.Generator().manual_seed(number))
        mask = (torch.arange(length) < length - 2 * number).long()
        data.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    settings = {"parallel": parallel, "gradient_accumulation_steps": len(lengths), "per_device_train_batch_size": 1}
    own = [ExpertLoadBalance(every=1), JsonLogger()]
    parts = {"train_dataset": data}
    small_trainer(output_dir, *own, model=mixtral(), parts=parts, max_steps=1, logging_steps=1, **settings).train()


@pytest.mark.parametrize("lengths", [[12, 12, 12, 12], [12, 12, 10, 12]], ids=["of one shape", "of two shapes"])
def test_all_stages_of_a_pipeline_are_counted(tmp_path: Path, lengths: list[int]) -> None:
    """Each router's tokens, without the padding of the micro-batch that passes it, as in one process."""

    def loads(name: str) -> dict[str, float]:
        records = read_records(tmp_path / name / "logs/train.jsonl")
        (record,) = [each for each in records if "kind" not in each]
        return {key: value for key, value in record.items() if key.startswith("expert_load/")}

    count(tmp_path / "one", "none", lengths)
    run_ranks(count, 2, tmp_path / "two", ds.Pipeline(2), lengths)
    assert len(loads("one")) == 2 * 3
    assert loads("two") == pytest.approx(loads("one"))
