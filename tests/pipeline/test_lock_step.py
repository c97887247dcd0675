"""Text of Hugging Face's models on two and three ranks, none of which holds all blocks, beside one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.materialise import Initialisation
from lightning_sdpipe.partition.plan import plan
from lightning_sdpipe.pipeline import lock_step
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.worker.assembly import assemble
from lightning_sdpipe.worker.options import Options
from tests.features.running import on_four_ranks, quiet_trainer
from tests.partition.architectures import BATCH, DECODER, IMAGES, SAMPLE, TEXT, build, ids, pixels, spectra
from tests.patience import limit
from tests.workers import run_workers

CPU = torch.device("cpu")
IMAGE = 300  # the token in the place of a patch
NAMES = [
    name for name in SAMPLE if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel"))
]
NAMES += ["GemmaForCausalLM", "PhiForCausalLM", "LlavaForConditionalGeneration"]
FIRST = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration")


class Speaking(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A model, and what to let it go on with."""
    torch.manual_seed(0)
    prompt = {"input_ids": ids(1, 100)[:2, :5]}
    if name == "LlavaForConditionalGeneration":
        config_of: Any = hf.LlavaConfig
        both = {"vision_config": hf.CLIPVisionConfig(**IMAGES), "text_config": hf.LlamaConfig(**DECODER)}
        model: Any = hf.LlavaForConditionalGeneration(config_of(**both, image_token_index=IMAGE))
        patches = torch.full((2, 16), IMAGE)
        return model, {"input_ids": torch.cat([patches, prompt["input_ids"]], 1), "pixel_values": pixels(1)[:2]}
    if name == "GemmaForCausalLM":
        return hf.GemmaForCausalLM(hf.GemmaConfig(**DECODER)), prompt
    if name == "PhiForCausalLM":
        return hf.PhiForCausalLM(hf.PhiConfig(**TEXT)), prompt
    model, _ = build(name)
    if name == "WhisperForConditionalGeneration":
        prompt = {"input_features": spectra(1)["input_features"][:2]}
    return model, prompt


def _speak(rank: int, stages: int, names: list[str]) -> dict[str, int]:
    """The number of tokens of each; all kinds are compared."""
    assert BATCH >= 2
    groups = ProcessGroups.open(Mesh.build(stages, stages), limit())
    counted: dict[str, int] = {}
    for name in names:
        model, prompt = made(name)
        module = Speaking(model).eval()
        whole = copy.deepcopy(module)
        stages_of = plan(module, stages, "uniform")
        options = Options(stages, num_micro_batches=1, run_timeout=limit())
        cut = assemble(module, [stages_of], groups, options, Initialisation(), CPU).cut_model
        assert any(parameter.is_meta for parameter in module.parameters())
        both: Any = (module, cut), (whole, CutModel(whole, stages_of.chain, [range(len(stages_of.chain))], CPU))
        kinds: list[dict[str, Any]] = [
            {"use_cache": cache, "do_sample": sample} for cache in (True, False) for sample in (True, False)
        ]
        if name == "LlamaForCausalLM":
            kinds += [{"cache_implementation": "static", "do_sample": True}, {"num_beams": 2}]
        for mode in (torch.no_grad, torch.inference_mode):
            for kind in kinds if mode is torch.no_grad else kinds[-2:]:
                tokens = []
                for each, streams in both:
                    streams.streams.begin(1)
                    with mode():
                        tokens.append(each.model.generate(**prompt, max_new_tokens=8, pad_token_id=1, **kind))
                assert torch.equal(*tokens), (name, kind, mode)
                counted[name] = counted.get(name, 0) + tokens[0].numel()
        for _, each in both:
            each.restore()
    return counted


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (2, FIRST),
        pytest.param(3, FIRST, marks=pytest.mark.slow),
        *(pytest.param(2, [name], marks=pytest.mark.slow, id=name) for name in NAMES if name not in FIRST),
    ],
)
def test_generate_gives_the_tokens_of_one_process(stages: int, names: list[str]) -> None:
    for counted in run_workers(stages, _speak, stages, names):
        assert all(counted[name] >= 2 * 8 for name in names)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_has_passed_a_call_is_not_awaited_there(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 sends its output to rank 1 over a slow link, and rank 0, which has it, waits for rank 1 in the next call;
    or rank 1 does something else."""
    place = "block 'words' in Speaking.on_fit_end"
    call = lock_step._Call(place, 5, [0, 1, 2], [1])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for times in range(2):
        assert call.lost() is None
        receives, sends = ([place, 4], [2], ""), ([place, 4], [0, 1], "")
        said = {1: lock_step._Said(1, times, *receives), 2: lock_step._Said(2, times, *sends)}
        call.hear(said if goes_on else {1: lock_step._Said(1, times, None, [0], "receiving from stage 0")})
    error = call.lost()
    assert goes_on == (error is None)
    assert goes_on or "rank 1 waits in receiving from stage 0" in str(error)


class Sampling(Speaking):
    """Generates in a step of evaluation, at the end of an epoch, and when a callback asks."""

    def __init__(self, model: nn.Module, prompt: dict[str, Tensor]) -> None:
        super().__init__(model)
        self.prompt = prompt
        self.said: list[tuple[str, list[list[int]]]] = []

    @torch.no_grad()
    def speak(self, where: str) -> None:
        for sample, cache in ((True, True), (True, False), (False, True), (False, False)):
            tokens = self.model.generate(  # type: ignore[operator]
                **self.prompt, max_new_tokens=6, pad_token_id=1, do_sample=sample, use_cache=cache
            )
            self.said.append((where, tokens.tolist()))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.speak("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.speak("on_validation_epoch_end")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.speak("predict_step")
        return batch


class Asking(L.Callback):
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.speak("callback")


def _in_hooks(directory: Path, stages: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        module = Sampling(*made(name)).eval()
        strategy = SDPipeStrategy(stages, AllReduce(), partition="uniform", num_micro_batches=1)
        trainer = quiet_trainer(default_root_dir=directory, strategy=strategy, devices=stages, callbacks=[Asking()])
        data: Any = DataLoader(torch.zeros(2, 1), 2)  # type: ignore[arg-type]
        trainer.validate(module, data, verbose=False)
        trainer.predict(module, data)
        found[name] = module.said
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("names", [NAMES[:10], NAMES[10:20], NAMES[20:]], ids=["first", "second", "third"])
def test_hooks_and_evaluation_generate_the_tokens_of_one_process(names: list[str], tmp_path: Path) -> None:
    (whole,) = on_four_ranks(_in_hooks, tmp_path, 1, names, count=1)
    for rank in on_four_ranks(_in_hooks, tmp_path, 2, names, count=2):
        for name in names:
            assert len(rank[name]) == 16
            assert rank[name] == whole[name], name
