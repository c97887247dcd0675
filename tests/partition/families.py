"""Small models of the families whose chain is found automatically, and what to call them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.partition.architectures import TEXT, build, words

Family = tuple[nn.Module, Callable[[nn.Module], Tensor]]


class Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        same = inside == outside and stride == 1
        self.downsample = None if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """The layout of torchvision's and timm's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Bottleneck(4, 6, 1), Bottleneck(6, 6, 1))
        self.layer2 = nn.Sequential(Bottleneck(6, 8, 2), Bottleneck(8, 8, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The layout of timm's vision transformer: class token and positions are parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.pos_drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(Attention(8), Attention(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.norm(self.blocks(self.pos_drop(x + self.pos_embed)))[:, 0])


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True)), nn.Sequential(nn.Sequential(nn.Linear(6, 5)))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Plain(nn.Module):
    """A module without containers, as its only child."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _Autoencoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.norm(self.down(x))))


def _classifies(*shape: int) -> Callable[[nn.Module], Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(*shape, generator=generator), torch.randint(0, 5, shape[:1], generator=generator)
    return lambda model: nn.functional.cross_entropy(model(x), y)


def _of_transformers(name: str, **options: Any) -> Callable[[], Family]:
    def make() -> Family:
        model, batch = build(name, **options)
        inputs = batch(1)
        if "input_ids" in inputs:
            inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
            inputs["attention_mask"][1, 4:] = 0
        return model, lambda model: model(**inputs).loss

    return make


def _with_pooler() -> Family:
    inputs = {**words(1), "next_sentence_label": torch.tensor([0, 1, 1, 0])}
    model = hf.BertForPreTraining(hf.BertConfig(**TEXT | {"num_hidden_layers": 2}))
    return model, lambda model: model(**inputs).loss


FAMILIES: dict[str, Callable[[], Family]] = {
    "resnet": lambda: (ResNet(), _classifies(3, 3, 16, 16)),
    "vit": lambda: (ViT(), _classifies(3, 3, 8, 8)),
    "nested": lambda: (Nested(), _classifies(3, 4)),
    "plain": lambda: (Plain(), _classifies(3, 4)),
    "bert": _of_transformers("BertForMaskedLM", num_hidden_layers=2),
    "bert_with_pooler": _with_pooler,
    "gpt2": _of_transformers("GPT2LMHeadModel", n_layer=3),
    "llama": _of_transformers("LlamaForCausalLM", num_hidden_layers=2, use_cache=False),
    "hf_vit": _of_transformers("ViTForImageClassification", num_hidden_layers=2),
    "hf_resnet": _of_transformers("ResNetForImageClassification", depths=[2, 2], hidden_sizes=[16, 32]),
}
